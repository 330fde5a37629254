"""`keyhole disrupt --certify K` as a function, and what it gives: one certificate for each text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core import Outcome, Result, environment
from keyhole.core.errors import InputError, expect_count
from keyhole.core.machine import expect_device
from keyhole.core.progress import Track, untracked
from keyhole.core.result import restored, typed
from keyhole.data import encode
from keyhole.disrupt.certificate.certify import SLACK, Certificate, certify
from keyhole.disrupt.hack_attend import Spare
from keyhole.disrupt.labels import settled
from keyhole.disrupt.run import SHIPPED, examples_of, source_of
from keyhole.disrupt.settings import expect_among
from keyhole.disrupt.units import Unit
from keyhole.models.anatomy import fitting

MOST = 64  # units: the bound says nothing long before


@dataclass(frozen=True, repr=False)
class Certification(Result):
    """The certificates of all texts, in their order."""

    certificates: tuple[Certificate, ...]
    k: int
    spare: str
    seconds: float
    model: str = ""
    data: str = ""
    slack: float = SLACK
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "certification"

    @property
    def right(self) -> tuple[Certificate, ...]:
        return tuple(proof for proof in self.certificates if proof.right)

    @property
    def certified(self) -> int:
        return sum(proof.holds for proof in self.right)

    @property
    def flipped(self) -> int:
        return sum(proof.flipped for proof in self.right)

    @property
    def outcome(self) -> Outcome:
        """A single unit flips a text; all are certified; or something is left open."""
        if self.flipped:
            return Outcome.GIVEN_AWAY
        whole = bool(self.right) and self.certified == len(self.right)
        return Outcome.KEPT if whole else Outcome.UNCHECKED

    def summary(self) -> str:
        right, count = self.right, len(self.right)
        stand = sum(proof.alone > self.slack for proof in right)
        lines = [
            f"{stand} of {count} right answers stand whichever single unit is cut, "
            f"{self.flipped} do not (exact: {sum(proof.units for proof in right):,} units were cut)"
        ]
        if self.k > 1:
            lines.append(f"{self.certified} of {count} whichever {self.k} units are cut (proved)")
            layers = max((len(proof.layers) for proof in right), default=0)
            each = [self._of(lambda proof, n=n: proof.holds_in(n)) for n in range(layers)]
            within = self._of(Certificate.holds_within_layers)
            lines.append(
                f"{within} of {count} whichever {self.k} units of one layer are cut (proved); "
                f"layer by layer: {', '.join(map(str, each))}"
            )
        skipped = len(self.certificates) - count
        lines.append(f"{skipped} that the model gets wrong were left alone; {self.seconds:.1f} s")
        return "\n".join(lines)

    def _of(self, proved: Callable[[Certificate], bool]) -> int:
        return sum(map(proved, self.right))

    def contents(self) -> dict[str, Any]:
        proofs = [
            {**asdict(proof), "unit": list(astuple(proof.unit)) if proof.unit else None,
             "holds": proof.holds, "flipped": proof.flipped}
            for proof in self.certificates
        ]  # fmt: skip
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {**plain, "certified": self.certified, "flipped": self.flipped,
                "certificates": proofs}  # fmt: skip

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        del tensors
        return cls(
            certificates=tuple(_restored(proof) for proof in data["certificates"]),
            **{name: data[name] for name in _PLAIN},
        )


_PLAIN = ("k", "spare", "seconds", "model", "data", "slack", "environment")
_DERIVED = ("holds", "flipped")


def _restored(data: dict[str, Any]) -> Certificate:
    unit = typed(tuple[int, int, int, int, int] | None, data.get("unit"), "unit")
    given = {name: value for name, value in data.items() if name not in _DERIVED}
    proof = restored(Certificate, {**given, "unit": None})
    return replace(proof, unit=None if unit is None else Unit(*unit))


def certify_all(
    model: str | Path, data: str | Path | None = None, k: int = 1, *,
    spare: Spare | None = None, text: Sequence[str] = (), label: str | None = None,
    classes: Sequence[str] = (), examples: int | None = None, longest: int = 128,
    device: str = "cpu", allow_pickle: bool = False, track: Track = untracked,
) -> Certification:  # fmt: skip
    """Which predictions stand, whichever units are cut, up to k of them; arguments as of `run`."""
    expect_count("--certify", k, 1, MOST)
    expect_count("--longest", longest)
    expect_device(device)
    spare = "special" if spare is None else spare
    expect_among("spare", spare, Spare)
    source = source_of(str(model), None, device, longest, allow_pickle)
    if source.task != "classification":
        raise InputError(f"expected a classifier to certify, got a model for {source.task}")
    chosen = examples_of(source, data, text, label, classes, examples)
    started = time.perf_counter()
    loaded, tokenizer = source.load()
    longest = fitting(loaded, tokenizer, longest) or longest
    progress = track("disrupt", len(chosen))
    proofs: list[Certificate] = []
    for example in chosen:
        batch, labels = encode(tokenizer, [example], longest=longest)
        answer = int(settled(loaded, batch, labels)[0])
        proofs.append(certify(loaded, batch, answer, k, spare=spare, name=example.id))
        progress(len(proofs), len(chosen))
    seconds = time.perf_counter() - started
    origin = SHIPPED if data is None else str(data)
    return Certification(tuple(proofs), k, spare, seconds, str(model), origin)
