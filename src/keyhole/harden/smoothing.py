"""A certificate by smoothing over masks: no cut of k units, anywhere, changes the vote.

Ours, after randomised ablation (Levine and Feizi, arXiv 1911.09272), on units of
attention instead of pixels. Let U be the units of a text that may be cut, also those
whose probability underflows. Let f(K) be the model's answer if only the units K ⊆ U are
kept (a query that keeps none contributes zero), and g the most frequent answer over
random K. An attack that cuts A ⊆ U changes f(K) to f(K ∖ A), which is the same if K and
A are disjoint.

- **random**: each unit is in K with probability ρ, independently. K and A intersect with
  probability `Δ = 1 − (1 − ρ)^|A|`, so no P(f = c) changes by more. g = c is certified
  for every A of k units if

      P(f = c) − P(f = j) > 2Δ(k)    for all j ≠ c            (two classes: P(f = c) > ½ + Δ)

  A first tenth of the masks chooses c. The others bound the probabilities by Clopper
  and Pearson's intervals, jointly at `confidence` (Bonferroni; with two classes one
  bound is enough).
- **partition**: U is divided at random into B = 1/ρ parts, and K is each part in turn. A intersects
  at most k parts, so at most k of B votes change. g = c is certified if `N_c − N_j >
  2k` for all j ≠ c. This is exact, holds even if the attacker knows the parts, takes B
  passes, and certifies at most (B − 1)/2 units.

Proofs are in docs/mathematics.md. The certificate is about the smoothed model g, so g
must be what is deployed: with new masks for each question (random), or always with the
same parts (partition). A model trained with S-Attend at rate 1 − ρ and `emptied` has
learnt to answer under these masks. A close vote is not certified. ρ = 0 is the model
without attention, which no cut changes; ρ = 1 is the plain model, for which nothing is
certified.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from keyhole.core import Outcome, Result, environment
from keyhole.core.errors import InputError, expect_among, expect_count, expect_number
from keyhole.core.machine import expect_device
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.core.text import percent
from keyhole.data import NO_LABEL, Batch, Example, encode
from keyhole.disrupt.hack_attend import Spare
from keyhole.disrupt.run import SHIPPED, examples_of, source_of
from keyhole.disrupt.tasks import Question, ask
from keyhole.disrupt.units import FixedCuts, Units, survey
from keyhole.models.anatomy import fitting
from keyhole.models.masking import rewriting

Kind = Literal["random", "partition"]


@dataclass(frozen=True)
class Smoothing:
    """Keep each unit with probability `keep` (ρ), or divide the units into 1/keep parts.

    `samples` masks are drawn, and a tenth more to choose the class. `spare` are the
    units that no attack may cut and every mask keeps, by default only padding. `batch`
    is the batch size.
    """

    keep: float = 0.05
    kind: Kind = "random"
    samples: int = 1000
    confidence: float = 0.999
    spare: Spare = "padding"
    batch: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("keep", "confidence"):
            expect_number(name, getattr(self, name), least=0, most=1)
        expect_among("kind", self.kind, Kind)
        expect_among("spare", self.spare, Spare)
        expect_count("samples", self.samples, 10)
        expect_count("batch", self.batch, 1)

    @property
    def exact(self) -> bool:
        """Whether all masks vote, so that the certificate holds without a confidence level."""
        return self.kind == "partition" or self.keep in (0, 1)

    @property
    def masks(self) -> int:
        """The number of masks that vote."""
        return self.parts if self.exact else self.samples

    @property
    def parts(self) -> int:
        """The number of parts of a partition, which is 1 if ρ is 0 or 1."""
        return round(1 / (self.keep or 1))

    def ballot(
        self,
        model: Any,
        batch: Batch,
        label: int,
        name: str = "0",
    ) -> Ballot:
        """Vote on one text (or one question with its choices), and certify the answer."""
        question, units = self.asked(model, batch, label)
        stream = self.stream(question)
        counts = self.votes(model, question, units, self.samples // 10, stream)
        answer = int(counts.argmax())
        if not self.exact:
            counts = self.votes(model, question, units, self.samples, stream)
        if label == NO_LABEL:
            label = answer
        votes = tuple(counts.tolist())
        free = int(units.free.sum())
        radius = min(free, self.radius(votes, answer))
        return Ballot(name, label, answer, votes, free, radius)

    def certify(
        self,
        model: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        k: int = 1,
        max_length: int | None = 128,
        progress: Progress = silent,
    ) -> Smoothed:
        """Vote on every example, and certify the answers for cuts of `k` units."""
        started = time.perf_counter()
        ballots = list[Ballot]()
        max_length = fitting(model, tokenizer, max_length)
        for example in examples:
            batch, labels = encode(tokenizer, [example], max_length=max_length)
            ballots.append(self.ballot(model, batch, int(labels[0]), example.id))
            progress(len(ballots), len(examples))
        return Smoothed(tuple(ballots), self, k, time.perf_counter() - started)

    def asked(
        self,
        model: Any,
        batch: Batch,
        label: int,
    ) -> tuple[Question, Units]:
        question = ask(
            model, batch, torch.tensor([max(0, label)] * len(batch["input_ids"]))
        )
        if question.size != 1 or question.task not in ("classification", "choice"):
            raise InputError(
                "smoothing takes one text of a classifier, or one multiple choice"
            )
        return question, survey(model, question, spare=self.spare, underflowing=True)

    def stream(self, question: Question) -> torch.Generator:
        """Seed this text's masks; a partition is the same for all texts of the same length."""
        ids = question.inputs["input_ids"].flatten().tolist()
        own = 0 if self.kind == "partition" else hash(tuple(ids)) % 2**31
        return torch.Generator(question.labels.device).manual_seed(
            self.seed * 2**31 + own
        )

    def votes(
        self,
        model: Any,
        question: Question,
        units: Units,
        count: int,
        stream: torch.Generator,
        cut: Tensor | None = None,
    ) -> Tensor:
        """Count the votes of `count` masks for each class, while an attack cuts the units `cut`."""
        total = torch.zeros(1, dtype=torch.long, device=units.free.device)
        for kept in self.drawn(units, question.rows, count, stream):
            left = kept if cut is None else kept & ~cut
            same = question.part(torch.zeros(len(left), dtype=torch.long))
            with torch.no_grad(), rewriting(model, Kept(units, left)):
                logits = same.logits(model)[:, 0]
            votes = torch.bincount(logits.argmax(-1), minlength=logits.shape[-1])
            total = total + votes
        return total

    def drawn(
        self,
        units: Units,
        rows: int,
        count: int,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        """Yield the units that `count` masks keep, or all masks if exact: (m, units) at a time."""
        device = units.free.device
        spared = ~units.free[0]
        numbers = torch.arange(self.masks if self.exact else count, device=device)
        part: Tensor | None = None
        if self.exact and self.keep:
            order = torch.randperm(units.total, generator=stream, device=device)
            part = order % self.parts
        for some in numbers.split(max(1, self.batch // rows)):
            if part is None:
                kept = spared.new_empty(len(some), units.total)
                kept.bernoulli_(self.keep, generator=stream)
            else:
                kept = part == some[:, None]
            yield kept | spared

    def radius(self, votes: Sequence[int], answer: int) -> int:
        """Return the largest k for which no cut of k units changes the answer.

        It is −1 if it is not even certain that the answer is the smoothed model's.
        """
        others = [count for number, count in enumerate(votes) if number != answer]
        if not self.keep:
            return _ANY
        if self.exact:
            return max(-1, (votes[answer] - max(others, default=0) - 1) // 2)
        drawn = sum(votes)
        bounds = len(votes) if len(votes) > 2 else 1
        doubt = (1 - self.confidence) / bounds
        least = at_least(votes[answer], drawn, doubt)
        without = [at_least(drawn - count, drawn, doubt) for count in others]
        most = 1 - max(least, min(without, default=1.0))
        gap = (least - most) / 2
        if gap <= 0:
            return -1
        radius = math.log1p(-gap) / math.log1p(-self.keep)
        return max(0, math.ceil(radius - _ROUNDING) - 1)


_ANY = 2**62  # more units than any model has
_ROUNDING = 1e-9


def at_least(
    hits: int,
    drawn: int,
    doubt: float,
) -> float:
    """Return Clopper and Pearson's lower bound of a probability, wrong with chance `doubt`."""
    from scipy.special import betaincinv  # part of the extra `models`

    return float(betaincinv(hits, drawn - hits + 1, doubt)) if hits else 0.0


class Kept(FixedCuts):
    """Keeps only the units `kept` (m, units), for m masks of one text."""

    empties = True

    def __init__(self, units: Units, kept: Tensor) -> None:
        super().__init__(units, ~kept)


@dataclass(frozen=True)
class Ballot:
    """The vote on one text: no cut of up to `radius` units changes the `answer`.

    `votes` counts them by class (or choice). `units` is the number of units that may be
    cut. The radius is −1 if even the vote without a cut is uncertain.
    """

    id: str
    label: int
    answer: int
    votes: tuple[int, ...]
    units: int
    radius: int

    @property
    def right(self) -> bool:
        return self.votes.index(max(self.votes)) == self.label

    def holds(self, k: int) -> bool:
        """Whether the answer is right, and certified for every cut of k units."""
        return self.answer == self.label and self.radius >= min(k, self.units)


@dataclass(frozen=True, repr=False)
class Smoothed(Result):
    """The votes on all texts, in order. Shares are relative to all texts."""

    ballots: tuple[Ballot, ...]
    smoothing: Smoothing
    k: int
    seconds: float
    model: str = ""
    data: str = ""
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "smoothed"

    @property
    def accuracy(self) -> float:
        return sum(ballot.right for ballot in self.ballots) / max(1, len(self.ballots))

    def certified(self, k: float) -> float:
        """The certified share for cuts of k units; if k < 1, of that share of each text's units."""
        held = 0
        for ballot in self.ballots:
            needed = k if k >= 1 else math.ceil(k * ballot.units)
            held += ballot.holds(int(needed))
        return held / max(1, len(self.ballots))

    def curve(self) -> dict[str, float]:
        """The certified share for k = 1, 2, 4, … and for 1% of each text's units."""
        hundredth = max((ballot.units for ballot in self.ballots), default=0) // 100
        ks = [1 << power for power in range(max(3, hundredth.bit_length()))]
        named = {f"{k} unit{'s' if k > 1 else ''}": self.certified(k) for k in ks}
        return {**named, "1% of the units": self.certified(0.01)}

    @property
    def outcome(self) -> Outcome:
        """KEPT if all answers are certified for k units, otherwise UNCHECKED."""
        return Outcome.KEPT if self.certified(self.k) == 1 else Outcome.UNCHECKED

    def summary(self) -> str:
        way = self.smoothing
        if way.exact:
            sure = "proved"
        else:
            sure = f"at a confidence of {percent(way.confidence, 1)} each"
        shares = ", ".join(
            f"{name} {percent(share, 1)}" for name, share in self.curve().items()
        )
        count = round(self.certified(self.k) * len(self.ballots))
        return (
            f"{count} of {len(self.ballots)} answers are right and unchanged by any cut of "
            f"{self.k} units ({sure})\naccuracy of the vote over {way.masks} masks that keep "
            f"{percent(way.keep, 1)} each: {percent(self.accuracy, 1)}\n"
            f"certified share: {shares}; {self.seconds:.1f} s"
        )

    def contents(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy, "certified": self.curve()}


def certify_all(
    model: str | Path,
    data: str | Path | None = None,
    k: int = 1,
    smoothing: Smoothing | None = None,
    *,
    text: Sequence[str] = (),
    label: str | None = None,
    classes: Sequence[str] = (),
    examples: int | None = None,
    max_length: int = 128,
    device: str = "cpu",
    allow_pickle: bool = False,
    track: Track = untracked,
) -> Smoothed:
    """Certify a model's answers for cuts of k units; arguments as in `keyhole.disrupt.run`."""
    expect_count("K", k)
    expect_count("--max-length", max_length)
    expect_device(device)
    source = source_of(str(model), None, device, max_length, allow_pickle)
    chosen = examples_of(source, data, text, label, classes, examples)
    loaded, tokenizer = source.load()
    progress = track("disrupt", len(chosen))
    found = (smoothing or Smoothing()).certify(
        loaded, tokenizer, chosen, k, max_length, progress
    )
    return replace(found, model=str(model), data=SHIPPED if data is None else str(data))
