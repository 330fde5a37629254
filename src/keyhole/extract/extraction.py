"""The result of an extraction: a model to call like the oracle, how it was judged, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core import Status, mismatch
from keyhole.core.result import Result, environment
from keyhole.extract.domain import Domain
from keyhole.oracle.links import Linked
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import Planted, from_tensors, metadata_of


def setting(default: Any, about: str) -> Any:
    """Return a field for a hyperparameter, with its help for `keyhole extract -o name=value`."""
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Check:
    """The judge's measurement on fresh queries, relative to the largest answer of their kind.

    `queries` are all that the judge sent; of these, a ledger answered `remembered` at
    no cost.
    """

    worst: float
    mean: float
    queries: int
    remembered: int = 0


@dataclass(frozen=True)
class Statement:
    """What a theorem states in advance: how exact, with how many queries, under which conditions.

    `accuracy` bounds ‖Ŵ − W‖_F and ‖v̂ − v‖. The `guarantee` of an extraction is about
    single entries, and follows from the answers.
    """

    theorem: str
    accuracy: float
    queries: int
    provided: str

    def __str__(self) -> str:
        return (
            f"{self.theorem} states: W and v within {self.accuracy:.1e} in norm, with at most "
            f"{self.queries:,} queries, if {self.provided}"
        )


@dataclass(frozen=True, repr=False)
class Extraction(Result):
    """The result of an extraction: a model to call like the oracle, and what it cost.

    - `queries`: those of the attack; a ledger answered `remembered` of them at no cost. Those of
      the judge are in `check.queries`.
    - `lower_bound`: the number of unknowns over the numbers in an answer, below which no attack can
      work. While the rank is not known it is an upper estimate, or None.
    - `known`: the share of the unknowns that the answers determine, if the target is what the
      method assumes; 0 if the answers contradict that, or if the unknowns cannot be
      counted.
    - `trace`: (queries, worst fresh-query error) along the way.
    - `domain`: where the model was tried and agrees: lengths of sequences, norms of tokens.
    - `guarantee` and `guarantee_v`: bounds on the error of every entry of W and of v that the
      answers prove under the method's assumptions; None if nothing is proved.
    - `stated`: what the theorem states in advance, for methods that follow one to the letter.
    - `layer`: what is known of a language model's last layer, whose states the model then takes.
    """

    status: Status
    reason: str
    method: str
    model: Planted | Linked | None
    queries: int
    seconds: float
    check: Check | None = None
    domain: Domain | None = None
    remembered: int = 0
    lower_bound: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    guarantee: float | None = None
    guarantee_v: float | None = None
    stated: Statement | None = None
    layer: LastLayer | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "extraction"
    tensors_key: ClassVar[str] = "weights"

    @property
    def advice(self) -> str:
        return self.status.advice

    @property
    def width(self) -> int | None:
        """The width of a language model, if its last layer was found."""
        return None if self.layer is None else self.layer.width

    def summary(self) -> str:
        least = "" if self.lower_bound is None else f" (unknowns: {self.lower_bound:,})"
        free = f", {self.remembered:,} of them remembered" if self.remembered else ""
        stated = "" if self.stated is None else f"{self.stated}\n"
        return (
            f"{self.status}: {self.reason}\n"
            f"{stated}"
            f"{self.queries:,} queries{free}{least}, {self.seconds:.2f} s\n"
            f"{self.advice}"
        )

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, model=None))
        del data["model"]
        return {**data, "advice": self.advice}

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.model is None else self.model.tensors()

    def metadata(self) -> dict[str, str] | None:
        return None if self.model is None else metadata_of(self.model)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        bare = super().restore({**data, "model": None}, tensors)
        if not tensors:
            return bare
        file = data[cls.tensors_key]
        return replace(bare, model=from_tensors(data["metadata"], dict(tensors), file))


@dataclass(frozen=True)
class Step:
    """What an attack knows at some point: a model, and how many unknowns are determined.

    - `known` of `unknowns` numbers are determined. While their number is not certain, `unknowns` is
      the largest possible one, or None.
    - `guarantee`, `guarantee_v`, `stated` and `layer` are as in Extraction. A guarantee holds if
      what `assumed` says holds; `confirm` tests that with other queries, and returns
      how many answers contradict it, of how many.
    - `numbers` is how many numbers an answer has, so `unknowns / numbers` answers are the fewest.
    - `remark` is what was found besides the weights; it joins the reason of a judged result.
    - `uncertainty` returns the standard error of the model's answers (b,) to sequences (b, n, d),
      as far as it is caused by errors of the answers that the model was fitted to.
    """

    model: Planted
    known: int
    unknowns: int | None
    guarantee: float | None = None
    guarantee_v: float | None = None
    numbers: int = 1
    remark: str = ""
    assumed: str = ""
    confirm: Callable[[Oracle], tuple[int, int]] | None = None
    stated: Statement | None = None
    layer: LastLayer | None = None
    uncertainty: Callable[[Tensor], Tensor] | None = None

    @property
    def share(self) -> float:
        """The share of the unknowns that is determined."""
        return self.known / self.unknowns if self.unknowns else 0.0

    @property
    def lower_bound(self) -> int | None:
        """The fewest answers that can be enough."""
        if self.unknowns is None:
            return None
        return math.ceil(self.unknowns / self.numbers)


def expect_finite_weights(*weights: Tensor) -> None:
    """Raise Unsuccessful if a solve gave NaN or infinity."""
    if not all(part.isfinite().all() for part in weights):
        raise mismatch("no finite weights explain the answers")


@dataclass(frozen=True)
class LastLayer:
    """The rank of a last layer's answers, the width that follows, and how exactly it is known.

    `above` and `below` are the last singular value that counts and the first that does
    not. If there is no cliff between them, `width` is None and `rank` a lower bound.
    `decimals` are the digits that answers were rounded to, if they were. `tokens` of
    the `vocabulary` have their row of the matrix. `stated` is the width that the server
    itself states.

    `rms` is the difference from the true matrix, if that was given, after the best
    linear map, and `relative` is the same relative to the matrix. `tied` means that the
    matrix is also the table of input embeddings. `ellipsoid` is the error of the
    answers on the final norm's ellipsoid, if the matrix is known up to a rotation, and
    `no_rotation` is why it is not, if that was wanted.
    """

    rank: int
    width: int | None
    constant: bool
    blocks: int
    log_probabilities: bool
    above: float
    below: float
    decimals: int | None
    tokens: int
    vocabulary: int
    stated: int | None = None
    rms: float | None = None
    relative: float | None = None
    tied: bool | None = None
    ellipsoid: float | None = None
    no_rotation: str = ""

    def __str__(self) -> str:
        if self.width is None:
            if self.stated is None:
                claimed = ""
            else:
                claimed = f", of {self.stated:,} that the server states"
            return f"{self.rank:,} directions or more{claimed}: no cliff yet"
        words = (
            f"width {self.width:,}: {self.rank:,} singular values down to {self.above:.1e}, "
            f"then {self.below:.1e}; {self._norm()}; {self.tokens:,} of {self.vocabulary:,} rows "
            f"of the matrix, up to "
        )
        if self.ellipsoid is None:
            words += f"an invertible {self.rank:,} × {self.rank:,} matrix"
            words += f" ({self.no_rotation})" if self.no_rotation else ""
        else:
            words += "a rotation and the norm's gain (answers off its ellipsoid by "
            words += f"{self.ellipsoid:.1e})"
        if self.log_probabilities:
            words += " and a row added to all of them"
        if self.decimals is not None:
            words += f"; answers rounded to {self.decimals} digits"
        if self.rms is not None and self.relative is not None:
            words += (
                f"; {self.rms:.1e} RMS from the true matrix after the best linear map, "
                f"{self.relative:.1e} of its own"
            )
        return words + (
            "; it is the table of input embeddings too" if self.tied else ""
        )

    def _norm(self) -> str:
        """Return what the constant shows of the layer's biases; OutputMatrix.width says why."""
        rank = self.rank - self.blocks
        if self.blocks:
            blocks = f"; {self.blocks} of them from a matrix in blocks of 32"
        else:
            blocks = ""
        if self.constant:
            if rank == self.width:
                likely = "a LayerNorm with biases"
            else:
                likely = "an output bias"
            return f"answers share a constant ({likely}){blocks}"
        likely = "an RMSNorm" if rank == self.width else "a LayerNorm without biases"
        return f"no constant, so no biases ({likely}){blocks}"
