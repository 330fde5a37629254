"""Targets that leak behind a link or in a short format, from a file and through a server.

Seven ways to answer, four kinds of target, two seeds: each is opened by its file, and each of the
first seed through one MLServer with all of them. Nothing is known of any but its answers. The seeds
are the first ones, not chosen. A target counts as recovered if the judge says so and the model
answers fresh questions like the target.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.core.status import OUTCOMES, Outcome
from keyhole.oracle import OpenInference, Oracle
from planted import fresh_error
from servers import free_port, serving
from show import Row

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda y: y.float().double(),
    "bfloat16": lambda y: y.bfloat16().double(),
    "3 decimals": lambda y: y.round(decimals=3),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda y: torch.stack([torch.zeros_like(y), y + 0.3], -1).softmax(-1),
    "affine": lambda y: 2.5 * y - 0.7,
}
KINDS: dict[str, Callable[[int], oracle.Planted]] = {
    "head": lambda seed: oracle.plant("head", dim=8, seed=seed),
    "low rank": lambda seed: oracle.plant("head", dim=12, rank=2, seed=seed),
    "several heads": lambda seed: oracle.plant("multi-head", dim=6, heads=2, seed=seed),
    "one layer": lambda seed: oracle.plant("one-layer", dim=6, width=5, seed=seed),
}
COARSE = ("bfloat16", "3 decimals")
RECOVERED, UNCHECKED, CLEAN, WRONG = SHOWN = (
    "recovered", "not checked", "called clean", "recovered wrongly",
)  # fmt: skip
SERVER = Path(__file__).with_name("leaking_server.py")


@dataclass(frozen=True)
class Case:
    kind: str
    form: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.form}-{self.seed}".replace(" ", "_")

    @classmethod
    def of(cls, file: Path) -> Case:
        kind, form, seed = file.stem.replace("_", " ").split("-")
        return cls(kind, form, int(seed))

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.safetensors"


@dataclass(frozen=True)
class End:
    """How an extraction ended, in one word and in more."""

    outcome: str
    reason: str
    queries: int
    seconds: float


class Answering:
    """A target in one of the forms."""

    def __init__(self, inner: Oracle, form: str) -> None:
        self.inner, self.form, self.dim = inner, FORMS[form], inner.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.form(self.inner(sequences))


def run(quick: bool) -> Iterator[Row]:
    kinds, seeds = (["head"], [0]) if quick else (list(KINDS), [0, 1])
    forms = ["sigmoid", "float32"] if quick else list(FORMS)
    cases = [Case(kind, form, seed) for kind in kinds for form in forms for seed in seeds]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases:
            oracle.save(KINDS[case.kind](case.seed), case.file(folder))
        ends = {(case, "from a file"): attack(case, opened(case, folder)) for case in cases}
        if importlib.util.find_spec("mlserver") is not None:
            first = [case for case in cases if case.seed == 0]
            ends |= {(case, "through a server"): end for case, end in served(first, folder)}
    for kind in kinds:
        for way in dict.fromkeys(way for _, way in ends):
            yield _row(f"{kind}, {way}", {
                case: end for (case, how), end in ends.items() if case.kind == kind and how == way
            })  # fmt: skip
    counts = Counter(end.outcome for end in ends.values())
    for wrong in (CLEAN, WRONG):
        yield show.exactly(f"leaking targets that are {wrong}", counts[wrong], 0)
    least = math.ceil(5 / 6 * len(ends))
    yield Row(
        f"leaking targets that are {RECOVERED}, of {len(ends)}",
        str(counts[RECOVERED]),
        f">= {least}",
        counts[RECOVERED] >= least,
        f"{counts[UNCHECKED]} {UNCHECKED}",
    )


def opened(case: Case, folder: Path) -> Answering:
    return Answering(oracle.load(case.file(folder)), case.form)


def served(cases: list[Case], folder: Path) -> Iterator[tuple[Case, End]]:
    """Every target of the folder behind one MLServer, attacked through it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, str(SERVER), str(folder), str(port)]
    with serving(command, f"{url}/v2/health/ready", folder):
        for case in cases:
            with closing(OpenInference(url, case.name)) as remote:
                yield case, attack(case, remote)


def attack(case: Case, target: Oracle) -> End:
    """The outcome of an extraction that knows nothing of the target, compared with the truth."""
    result, seconds = show.timed(lambda: extract.Auto(seed=case.seed)(target))
    outcome = OUTCOMES[result.status]
    if outcome is not Outcome.GIVEN_AWAY or result.model is None:
        shown = CLEAN if outcome is Outcome.KEPT else UNCHECKED
        return End(shown, str(result.status), result.queries, seconds)
    truth = Answering(KINDS[case.kind](case.seed), case.form)
    error = fresh_error(truth, result.model, [3], 64, size=1 / 3)
    shown = RECOVERED if error <= (0.05 if case.form in COARSE else 1e-4) else WRONG
    return End(shown, f"error {error:.0e}", result.queries, seconds)


def _row(what: str, ends: dict[Case, End]) -> Row:
    counts = Counter(end.outcome for end in ends.values())
    failed = [
        f"{case.form}, seed {case.seed}: {end.outcome} ({end.reason})"
        for case, end in ends.items()
        if end.outcome != RECOVERED
    ]
    queries = max(end.queries for end in ends.values())
    seconds = max(end.seconds for end in ends.values())
    measured = ", ".join(f"{counts[each]} {each}" for each in SHOWN if counts[each])
    details = f"{queries:,} queries and {seconds:.1f} s at most"
    return Row(what, measured, details="; ".join([details, *failed]))


if __name__ == "__main__":
    show.main(run)
