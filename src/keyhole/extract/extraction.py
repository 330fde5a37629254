"""What every extraction returns: a model to call like the oracle, judged, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core.finding import points
from keyhole.core.result import Result, environment, typed
from keyhole.core.status import Status
from keyhole.extract.domain import Domain
from keyhole.extract.last_layer.described import LastLayer
from keyhole.oracle.links import Linked
from keyhole.oracle.storage import Planted, from_tensors, metadata_of


@dataclass(frozen=True)
class Check:
    """The judge's measurement on fresh queries, relative to the largest answer of their kind.

    `queries` are all that the judge asked, `remembered` of them a ledger answered for free.
    """

    worst: float
    mean: float
    queries: int
    remembered: int = 0


@dataclass(frozen=True)
class Statement:
    """What a theorem states before anything is asked: how exact, by how many queries, if what.

    `accuracy` bounds ‖Ŵ − W‖_F and ‖v̂ − v‖; `guarantee` of an extraction is about single entries,
    and follows from the answers. `needs` is what the theorem would ask for to state more.
    """

    theorem: str
    accuracy: float
    queries: int
    provided: str
    needs: str = ""

    def __str__(self) -> str:
        needs = f"; {self.needs}" if self.needs else ""
        return (
            f"{self.theorem} states: W and v within {self.accuracy:.1e} in norm, with at most "
            f"{self.queries:,} queries, if {self.provided}{needs}"
        )


@dataclass(frozen=True, repr=False)
class Extraction(Result):
    """What an extraction brought: a model to call like the oracle, and what it cost.

    `queries` counts what the attack asked, `remembered` how many of those a ledger answered for
    free; the judge's fresh queries are in `check.queries`. `floor` is the number of unknowns over
    the numbers in an answer: no attack can do with fewer. Where it is still open, for want of a
    rank, it is the most that there can be, or None. `known` is the share of the unknowns that the
    answers settle at least, if the target is what the method takes it for: 0 where the answers
    contradict that, and where nobody can tell how many unknowns there are. `trace` holds (queries,
    worst fresh-query error) along the way.
    `domain` is where the model was tried and agrees: lengths of sequences, norms of tokens.
    `guarantee` bounds the error of every entry of W, `guarantee_v` of v, where the answers prove
    one under the method's assumptions; None means that nothing is promised. `stated` is what the
    theorem says in advance, of methods that follow one to the letter. `layer` is what is known of
    a language model's last layer, whose states the model then takes.
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
    floor: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    guarantee: float | None = None
    guarantee_v: float | None = None
    stated: Statement | None = None
    layer: LastLayer | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "extraction"
    beside: ClassVar[str] = "weights"

    @property
    def advice(self) -> str:
        return self.status.advice

    @property
    def width(self) -> int | None:
        """The width of a language model, if its last layer was sought and found."""
        return None if self.layer is None else self.layer.width

    def summary(self) -> str:
        floor = "" if self.floor is None else f" (unknowns: {self.floor:,})"
        free = f", {self.remembered:,} of them remembered" if self.remembered else ""
        stated = "" if self.stated is None else f"{self.stated}\n"
        return (
            f"{self.status}: {self.reason}\n"
            f"{stated}"
            f"{self.queries:,} queries{free}{floor}, {self.seconds:.2f} s\n"
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
        model = None
        if tensors:
            model = from_tensors(data["metadata"], dict(tensors), data[cls.beside])
        return cls(
            status=Status(data["status"]),
            check=None if data["check"] is None else Check(**data["check"]),
            domain=None if data["domain"] is None else _domain(data["domain"]),
            trace=points(data["trace"]),
            stated=typed(Statement | None, data.get("stated"), "stated"),
            layer=typed(LastLayer | None, data.get("layer"), "layer"),
            model=model,
            **{name: data[name] for name in _PLAIN},
        )


def _domain(data: dict[str, Any]) -> Domain:
    (short, long), (low, high) = data["lengths"], data["norms"]
    return Domain((int(short), int(long)), (float(low), float(high)), float(data["largest"]))


_PLAIN = (
    "reason", "method", "queries", "seconds", "remembered", "floor", "known", "guarantee",
    "guarantee_v", "environment",
)  # fmt: skip
