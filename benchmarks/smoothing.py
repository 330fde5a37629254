"""Smoothing over masks: texts that provably no cut of k units flips, and those that attacks flip.

For every ρ of `--keeps`, a classifier is trained on SST-2 with S-Attend at rate 1 − ρ
(a query that keeps no key gets zero), starting from the classifier that ships or from
MiniLM (`--model minilm`, `--encoder FOLDER`). It votes over masks
(src/keyhole/harden/smoothing.py). Measured is the share of texts that are right and
certified for k = 1, 2, 4, …: with random masks at 99.9% confidence on the first
`--sampled` texts, and with a partition on the first `--texts`. The classifier reads the
mean of all tokens, so that ρ = 0 (no attention) is a bag of words; ρ = 1 is the plain
model.

The first `--attacked` right answers are then attacked through the mean probability over
masks: `ours` ranks units by what their removal costs the vote, `as released` is
HackAttend's search. Fresh masks decide whether the vote flipped. No certified text may
flip. On a GPU products are in TF32. `--join FILE …` keeps the rows of earlier runs and
measures only what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import show
import subjects
import trained
from keyhole.data import Example, encode
from keyhole.disrupt.budget import budget
from keyhole.disrupt.greedy import Greedy
from keyhole.disrupt.masked_queries import Ordering, Search
from keyhole.disrupt.tasks import Question
from keyhole.disrupt.units import Units, survey
from keyhole.harden import Smoothed, Smoothing, Training
from keyhole.harden.smoothing import Ballot, Kept, Kind
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER
from keyhole.models.masking import Site, rewriting
from show import Row
from trained import Run

MASKS_AT_ONCE = 512  # in one pass
MASKS = 32  # masks that an attack averages over
RANKINGS = 16  # times that units are ranked again while more are cut
JUDGES = 200  # fresh masks that decide after an attack
SHARE = 0.01  # the largest share of all units that is cut
ALONE = 1e-6  # a unit is alone in its row if the others hold no more than this
MAX_LENGTH = 128
KINDS: tuple[Kind, ...] = ("partition", "random")
# epochs, batch, rate: of the demo classifier on two cores, of MiniLM on a GPU
SIZES = {
    "demo": (1, 64, 5e-4),
    "minilm": (4, 256, 1.5e-4),
    "tiny": (2, 16, 3e-3),
}


class Mean(nn.Module):
    """BERT's pooler, reading the mean of all tokens instead of the first."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.pooler = encoder.pooler
        encoder.pooler = self
        self.real: Tensor | None = None
        encoder.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _encoder: Any, _args: Any, given: dict[str, Any]) -> None:
        self.real = given["attention_mask"]

    def forward(self, states: Tensor) -> Tensor:
        assert self.real is not None
        weights = self.real.to(states.dtype)[..., None]
        return self.pooler(
            (states * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        )


class Slopes(Kept):
    """Attention under masks, whose probabilities can be differentiated."""

    def __init__(self, units: Units, kept: Tensor) -> None:
        super().__init__(units, kept)
        self.weights, self.bumps = list[Tensor](), list[Tensor]()

    def seen(self, site: Site, probabilities: Tensor) -> None:
        del site
        self.weights.append(probabilities.detach())

    def bump(self, site: Site, shape: torch.Size) -> Tensor:
        del site, shape
        self.bumps.append(torch.zeros_like(self.weights[-1]).requires_grad_())
        return self.bumps[-1]


@dataclass(eq=False)
class SmoothedQueries:
    """The queries of disrupt/greedy.py to the smoothed model for one text, over masks `kept`.

    Its logits are logarithms of the mean probability over the masks.
    """

    model: Any
    question: Question
    units: Units
    kept: Tensor  # (masks, units)
    batch: int

    def logits(self, ordering: Ordering, indices: Tensor, steps: Tensor) -> Tensor:
        return self.votes(ordering.at(steps, indices))[:, None]

    def silenced(self, indices: Tensor, sites: Tensor, heads: Tensor) -> Tensor:
        """Cut whole heads, by cutting all of their units."""
        cuts = torch.zeros(
            len(indices), self.units.total, dtype=torch.bool, device=self.kept.device
        )
        for cut, site, head in zip(cuts, sites.tolist(), heads.tolist(), strict=True):
            self.units.at(cut, self.units.places[site])[
                :, slice(None) if head < 0 else head
            ] = True
        return self.votes(cuts)[:, None]

    @torch.no_grad()
    def votes(self, cuts: Tensor) -> Tensor:
        """Return the logits (c, classes) under each of the cuts (c, units)."""
        means: list[Tensor] = []
        for group in cuts.split(max(1, self.batch // len(self.kept))):
            left = (self.kept & ~group[:, None]).flatten(0, 1)
            with rewriting(self.model, Kept(self.units, left)):
                chances = self._asked(len(left)).logits(self.model)[:, 0].softmax(-1)
            means.append(chances.unflatten(0, (len(group), -1)).mean(1))
        return torch.cat(means).log()

    def _asked(self, count: int) -> Question:
        return self.question.part(
            torch.zeros(count, dtype=torch.long, device=self.kept.device)
        )

    def slopes(self, cut: Tensor, indices: Tensor, loss: str) -> tuple[Tensor, Tensor]:
        """Return mean attention and gradients (1, units) of −log of the label's probability."""
        del indices, loss
        weights, gradients, _ = self.differentiated(cut[0])
        return weights, gradients

    def differentiated(self, cut: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean a, ∂/∂a of −log of the label's mean probability, and the removal effects."""
        total = torch.zeros((), device=cut.device)
        columns = list[Tensor]()
        for kept in self.kept.split(self.batch):
            slopes = Slopes(self.units, kept & ~cut)
            part = self._asked(len(kept))
            with torch.enable_grad(), rewriting(self.model, slopes):
                chances = part.confidence(part.logits(self.model)).sum()
                found = torch.autograd.grad(-chances, slopes.bumps)
            total += chances.detach()
            pairs = zip(slopes.weights, found, strict=True)
            each = [(a, g, removed(a, g)) for a, g in pairs]
            columns.append(
                torch.stack(
                    [
                        torch.cat(
                            [
                                site[number].reshape(len(kept), -1).sum(0)
                                for site in each
                            ]
                        )
                        for number in range(3)
                    ]
                )
            )
        a, g, effect = torch.stack(columns).sum(0)
        total = total.clamp(min=torch.finfo(total.dtype).tiny)
        return a[None] / len(self.kept), g[None] / total, effect / total


def removed(a: Tensor, g: Tensor) -> Tensor:
    """Return the first-order change of the loss when a unit is cut and its row renormalises."""
    others = (a * g).sum(-1, keepdim=True) - a * g
    rest = torch.where(1 - a > ALONE, others / (1 - a).clamp(min=ALONE), 0.0)
    return a * (rest - g)


def ours(queries: SmoothedQueries, most: int) -> list[Tensor]:
    """Return nested cuts of 1, 4, 16, … `most` units."""
    cut = torch.zeros_like(queries.kept[0])
    cuts = list[Tensor]()
    asked = [4**power for power in range(10) if 4**power < most] + [most]
    for k in sorted(
        {*asked, *(math.ceil(most * part / RANKINGS) for part in range(1, RANKINGS))}
    ):
        _, _, effect = queries.differentiated(cut)
        effect = effect.masked_fill(cut | ~queries.units.free[0], -torch.inf)
        cut = cut.clone()
        cut[effect.topk(k - int(cut.sum())).indices] = True
        cuts += [cut] if k in asked else []
    return cuts


def as_released(queries: SmoothedQueries) -> Tensor:
    """Run HackAttend's search as released, and return the units that it cuts."""
    units = queries.units
    limits = budget(units, SHARE, "head", least=1)
    noise = torch.zeros_like(units.free, dtype=torch.float32)
    search = Search(cast("Any", queries), limits, "gradient", "cross-entropy", noise)
    return Greedy()(search).cut[0]


@dataclass(frozen=True)
class Attacked:
    """One text: its certified number of units, and by attack which cuts flipped the vote."""

    id: str
    certified: int
    flips: dict[str, dict[int, bool]]

    def flipped(self, attack: str, k: int) -> bool:
        return any(hit for units, hit in self.flips[attack].items() if units <= k)

    @property
    def broken(self) -> bool:
        return any(
            hit and units <= self.certified
            for each in self.flips.values()
            for units, hit in each.items()
        )


def attacked(
    loaded: Loaded, example: Example, ballot: Ballot, way: Smoothing
) -> Attacked:
    batch, _ = encode(loaded.tokenizer, [example], max_length=MAX_LENGTH)
    question, units = way.asked(loaded.model, batch, ballot.answer)
    own = replace(way, seed=way.seed + 1)
    kept = torch.cat(list(own.drawn(units, question.rows, MASKS, own.stream(question))))
    size = max(1, way.batch // question.rows)
    queries = SmoothedQueries(loaded.model, question, units, kept, size)
    judge = replace(way, seed=way.seed if way.exact else way.seed + 2)

    def flips(cut: Tensor) -> bool:
        stream = judge.stream(question)
        votes = judge.votes(loaded.model, question, units, JUDGES, stream, cut)
        return int(votes.argmax()) != ballot.answer

    most = max(1, int(SHARE * units.free.sum()))
    found = {"ours": {int(cut.sum()): flips(cut) for cut in ours(queries, most)}}
    free = survey(loaded.model, question, spare="first token")
    cut = as_released(replace(queries, units=free))
    found["as released"] = {int(cut.sum()): flips(cut)}
    return Attacked(example.id, ballot.radius, found)


@dataclass(frozen=True)
class Options:
    """The classifiers, and how each is measured."""

    model: Literal["demo", "minilm", "tiny"] = "demo"
    texts: int = 872
    sampled: int = 200
    attacked: int = 20
    samples: int = 1000
    data: Path = subjects.DATA
    encoder: Path | None = None
    device: str = subjects.DEVICE

    @property
    def source(self) -> trained.Options:
        kind = trained.Tiny if self.model == "tiny" else trained.Options
        return kind(data=self.data, encoder=self.encoder, device=self.device)

    def fresh(self) -> Loaded:
        if self.model != "demo":
            return self.source.fresh(0)
        torch.manual_seed(0)
        return load_model(FOLDER, task="classification", device=self.device)


def classifier(
    options: Options, keep: float, train: Sequence[Example]
) -> tuple[Loaded, Training]:
    epochs, batch, rate = SIZES[options.model]
    loaded = options.fresh()
    Mean(loaded.model.base_model)
    training = trained.fit(
        loaded,
        train,
        f"sattend:rate={1 - keep:.9g}:emptied=true",
        options.device,
        epochs=epochs,
        batch=batch,
        rate=rate,
        seed=0,
        pool=32,
        max_length=MAX_LENGTH,
    )
    torch.backends.cuda.matmul.allow_tf32 = True  # trained.fit switches it off
    loaded.model.requires_grad_(False)
    return loaded, training


def voted(
    what: str, loaded: Loaded, way: Smoothing, dev: Sequence[Example], options: Options
) -> Row:
    found = way.certify(loaded.model, loaded.tokenizer, dev, max_length=MAX_LENGTH)
    trained.log(f"{what}: {found.summary()}")
    pairs = zip(dev, found.ballots, strict=True)
    right = [
        each for each in pairs if each[1].right and each[1].answer == each[1].label
    ]
    results = [attacked(loaded, *each, way) for each in right[: options.attacked]]
    return summed_up(what, found, results)


def summed_up(what: str, found: Smoothed, results: Sequence[Attacked]) -> Row:
    """Return the row of one classifier and one kind of masks: certified shares and flips."""
    broken = sum(result.broken for result in results)
    most = max((max(result.flips["ours"]) for result in results), default=0)
    flips = [
        f"at most {k} units {sum(result.flipped('ours', k) for result in results)} and "
        f"{sum(result.flipped('as released', k) for result in results)}"
        for k in (4**power for power in range(10))
        if k < 4 * most
    ]
    certified = ", ".join(
        f"{label} {share:.1%}" for label, share in found.curve().items()
    )
    details = "; ".join(
        [
            f"accuracy of the vote {found.accuracy:.1%} of {len(found.ballots)}",
            f"certified {certified}",
            f"of {len(results)} right answers ours and as released flip by "
            + ", ".join(flips or ["nothing"]),
            f"{broken} certified flipped",
            f"{found.seconds:.0f} s",
        ]
    )
    run = {
        "row": what,
        "accuracy": found.accuracy,
        "certified": found.curve(),
        "at_4": found.certified(4),
        "smoothing": asdict(found.smoothing),
        "ballots": [list(asdict(ballot).values()) for ballot in found.ballots],
        "tried": [asdict(result) for result in results],
    }
    at = f"{found.certified(4):.1%} at 4 units"
    return Row(what, at, "0 certified flipped", broken == 0, details, run=run)


def run(
    quick: bool,
    options: Options = Options(),  # noqa: B008 - read, never changed
    keeps: list[float] = [1.0, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.0],  # noqa: B006
    join: list[Path] = [],  # noqa: B006
) -> Iterator[Row]:
    if quick:
        keeps = [1.0, 0.1, 0.0]
        options = replace(
            options,
            model="tiny",
            texts=4,
            sampled=4,
            attacked=1,
            samples=60,
            device="cpu",
        )
    runs = trained.joined(join)
    yield from (Row(run=each, **each["line"]) for each in runs)
    for keep in keeps:
        what = f"{options.model}, sst2, mean, ρ = {keep:g}"
        ways = [
            Smoothing(keep, kind, options.samples, batch=MASKS_AT_ONCE)
            for kind in (KINDS if 0 < keep < 1 else KINDS[:1])
            if not any(each["row"] == f"{what}, {kind}" for each in runs)
        ]
        if not ways:
            continue
        train, dev = options.source.sst2()
        order = torch.randperm(
            len(train), generator=torch.Generator().manual_seed(0)
        ).tolist()
        loaded, training = classifier(
            options, keep, [train[number] for number in order]
        )
        trained.log(f"{what}: {training.summary()}")
        for way in ways:
            count = options.texts if way.exact else options.sampled
            row = voted(f"{what}, {way.kind}", loaded, way, dev[:count], options)
            row = replace(row, details=f"{row.details}; {training.summary()}")
            runs.append(
                {**(row.run or {}), "training": training.to_dict(), "line": row.cells}
            )
            yield replace(row, run=runs[-1])
    yield from () if quick else verdicts(runs)


def verdicts(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield the targets, on the runs with the most texts."""
    for name in dict.fromkeys(each["row"].split(", ρ")[0] for each in runs):
        own = [each for each in runs if each["row"].startswith(f"{name}, ρ")]
        most = max(len(each["ballots"]) for each in own)
        whole = [each for each in own if len(each["ballots"]) == most]
        votes = [each for each in whole if each["smoothing"]["keep"] < 1]
        if votes:
            good = [each for each in votes if each["accuracy"] >= 0.8]
            best = max(good or votes, key=lambda each: each["at_4"])
            yield Row(
                f"{name}: certified at 4 units, where the vote is right on 80% or more",
                f"{best['at_4']:.1%}",
                ">= 60%",
                bool(good) and best["at_4"] >= 0.6,
                f"{best['row']}: accuracy {best['accuracy']:.1%}",
            )
        for plain in [each for each in whole if each["smoothing"]["keep"] == 1][:1]:
            yield from (against(each, plain) for each in votes)


def against(vote: Run, plain: Run) -> Row:
    """Compare flips by at most 1% of the units with those of the plain model, on the same texts."""
    flips = [
        {
            text["id"]: [any(hits.values()) for hits in text["flips"].values()]
            for text in each["tried"]
        }
        for each in (plain, vote)
    ]
    same = [name for name in flips[0] if name in flips[1]]
    counts = [
        [sum(found[name][attack] for name in same) for attack in (0, 1)]
        for found in flips
    ]
    worst = [
        sum(any(found[name]) for name in same) / max(1, len(same)) for found in flips
    ]
    met = bool(same) and worst[1] <= 0.15 and vote["accuracy"] >= plain["accuracy"]
    return Row(
        f"{vote['row']}: flips by 1% of the units",
        f"{worst[0]:.1%} → {worst[1]:.1%}",
        "<= 15%, accuracy no lower",
        met,
        f"accuracy {plain['accuracy']:.1%} → {vote['accuracy']:.1%}; ours {counts[0][0]} → "
        f"{counts[1][0]}, as released {counts[0][1]} → {counts[1][1]} of {len(same)} right in both",
        promise=False,
    )


if __name__ == "__main__":
    show.main(run)
