"""Targets that leak behind a link or in a short format, from a file and through a server.

Seven ways to answer, four kinds of target, two seeds: each is opened by its file, and each of the
first seed through one MLServer with all of them. Nothing is known of any but its answers. The seeds
are the first ones, not chosen. A target counts as recovered if the judge says so and the model
answers fresh questions like the target.
"""

from __future__ import annotations

import importlib.util
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.core.status import OUTCOMES, Outcome
from keyhole.oracle import OpenInference, Oracle
from show import Row, relative

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
WAYS = ("from a file", "through a server")
SAID = RECOVERED, UNCHECKED, CLEAN, WRONG = (
    "recovered", "not checked", "called clean", "recovered wrongly",
)  # fmt: skip
SERVER = Path(__file__).with_name("leaking_server.py")
_SHARE = 5 / 6  # of the targets that are to be recovered


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

    said: str
    reason: str
    queries: int
    seconds: float


Ends = dict[tuple[Case, str], End]


class Answering:
    """A target in one of the forms."""

    def __init__(self, inner: Oracle, form: str) -> None:
        self.inner, self.form, self.dim = inner, FORMS[form], inner.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.form(self.inner(sequences))


def run(quick: bool) -> list[Row]:
    kinds, seeds = (["head"], [0]) if quick else (list(KINDS), [0, 1])
    forms = ["sigmoid", "float32"] if quick else list(FORMS)
    cases = [Case(kind, form, seed) for kind in kinds for form in forms for seed in seeds]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases:
            oracle.save(KINDS[case.kind](case.seed), case.file(folder))
        ends = {(case, "from a file"): attack(case, opened(case, folder)) for case in cases}
        with served(folder) as url:
            for case in cases if url else []:
                if case.seed == 0:
                    with closing(OpenInference(url, case.name)) as remote:
                        ends[case, "through a server"] = attack(case, remote)
    rows = [_row(kind, way, ends) for kind in kinds for way in WAYS]
    return [*(row for row in rows if row), *_totals(ends)]


def opened(case: Case, folder: Path) -> Answering:
    return Answering(oracle.load(case.file(folder)), case.form)


def attack(case: Case, target: Oracle) -> End:
    """The outcome of an extraction that knows nothing of the target, compared with the truth."""
    started = time.perf_counter()
    result = extract.Auto(seed=case.seed)(target)
    seconds, outcome = time.perf_counter() - started, OUTCOMES[result.status]
    if outcome is not Outcome.GIVEN_AWAY or result.model is None:
        said = {Outcome.KEPT: CLEAN}.get(outcome, UNCHECKED)
        return End(said, str(result.status), result.queries, seconds)
    truth = Answering(KINDS[case.kind](case.seed), case.form)
    stream = torch.Generator().manual_seed(5)
    fresh = torch.randn(64, 3, truth.dim, generator=stream, dtype=torch.float64) / 3
    error = relative(result.model(fresh), truth(fresh))
    said = RECOVERED if error <= (0.05 if case.form in COARSE else 1e-4) else WRONG
    return End(said, f"error {error:.0e}", result.queries, seconds)


@contextmanager
def served(folder: Path) -> Iterator[str | None]:
    """The address of an MLServer with every target of a folder; None where it is not installed."""
    if importlib.util.find_spec("mlserver") is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), str(folder), str(port)]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    with log.open("w") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as process:
        try:
            _wait(f"{url}/v2/health/ready", process, log)
            yield url
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            if httpx.get(url).is_success:
                return
        time.sleep(0.2)
    raise SystemExit(f"expected a server, got {log.read_text()[-500:]}")


def _row(kind: str, way: str, ends: Ends) -> Row | None:
    given = {case: end for (case, how), end in ends.items() if case.kind == kind and how == way}
    if not given:
        return None
    counts = Counter(end.said for end in given.values())
    failed = [
        f"{case.form}, seed {case.seed}: {end.said} ({end.reason})"
        for case, end in given.items()
        if end.said != RECOVERED
    ]
    seconds = [end.seconds for end in given.values()]
    details = (
        f"{max(end.queries for end in given.values()):,} queries and {max(seconds):.1f} s at most"
    )
    measured = ", ".join(f"{counts[said]} {said}" for said in SAID if counts[said])
    return Row(f"{kind}, {way}", measured, details="; ".join([details, *failed]))


def _totals(ends: Ends) -> list[Row]:
    counts, all_of_them = Counter(end.said for end in ends.values()), len(ends)
    least = math.ceil(_SHARE * all_of_them)
    return [
        Row(f"leaking targets that are {CLEAN}", str(counts[CLEAN]), "0", counts[CLEAN] == 0),
        Row(f"leaking targets that are {WRONG}", str(counts[WRONG]), "0", counts[WRONG] == 0),
        Row(
            f"leaking targets that are {RECOVERED}, of {all_of_them}",
            str(counts[RECOVERED]),
            f">= {least}",
            counts[RECOVERED] >= least,
            f"{counts[UNCHECKED]} {UNCHECKED}",
        ),
    ]


if __name__ == "__main__":
    show.main(run, __doc__)
