"""HackAttend's ablations: rankings, orders, half scale, spared tokens, and flips by share.

Each row is the released schedule with one thing changed, or our attack on each head or
on the whole model, on SST-2's dev set. `--models` takes folders, such as several seeds
of one model; each figure is then a mean with its range. The default is the classifier
that ships. With `--task next-token` the models generate text (.gguf files work too),
and the attack flips the next token. Rows are measured at `--share`, the curve at
`--shares`; `--only` selects rows by a part of their names, and `--texts` the first
sentences. `--join FILE…` makes one table of several `--json` files, so that seeds can
run one by one. `make pictures` draws the curve. `--quick` takes two reviews that ship.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import show
import subjects
import trained
from keyhole.data import Example, read_examples
from keyhole.disrupt import HackAttend, Rerank
from keyhole.disrupt.batches import Batches
from keyhole.models import Loaded, load_model
from keyhole.models.demo import EXAMPLES, FOLDER
from show import Row

SHARES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
RELEASED = "as released (ranked by −gradient)"
MAGNITUDE = "ranked by gradient magnitude"
ABLATIONS: dict[str, dict[str, Any]] = {
    RELEASED: {},
    MAGNITUDE: {"ranking": "magnitude"},
    "ranked by the gradient of a mask before the softmax": {"ranking": "mask-gradient"},
    "ranked by that gradient's magnitude": {"ranking": "mask-magnitude"},
    "ranked by gradient × attention": {"ranking": "gradient*attention"},
    "ranked by the effect of removal": {"ranking": "removal"},
    "ranked by attention score": {"ranking": "attention"},
    "random units": {"ranking": "random"},
    "random layer order": {"order": "random layer"},
    "random head order": {"order": "random head"},
    "random layers and heads": {"order": "random"},
    "random layers, heads and units": {"order": "random", "ranking": "random"},
    "half scale": {"scale": "half"},
    "special tokens spared": {"spare": "special"},
}
STRONGER = "stronger (ours, special tokens spared)"
SPARING = {
    STRONGER: "special",
    "stronger, special keys spared": "special keys",
    "stronger, padding spared": "padding",
}
OURS: dict[str, dict[str, Any]] = {
    **{name: {"spare": spare} for name, spare in SPARING.items()},
    **{
        f"{name}, of the model": {"spare": spare, "scope": "model"}
        for name, spare in SPARING.items()
    },
}
CURVES = (RELEASED, MAGNITUDE, "random units", STRONGER)


@dataclass(frozen=True)
class Measured:
    """One attack on one model: how many of the right answers flipped, and what that took."""

    model: str
    attack: str
    share: float
    right: int
    flips: int
    cut: float  # share of all units, mean over the flips
    worst_head: float
    queries: float
    seconds: float
    control: float  # the largest change of a logit by masks that cut nothing
    # For each sentence the number of units cut if it flipped, otherwise 0.
    sentences: dict[str, int] = field(default_factory=dict[str, int])


def run(
    quick: bool,
    models: list[Path] = [FOLDER],  # noqa: B006 - read, never changed
    data: Path = subjects.DATA,
    task: Literal["sst2", "next-token"] = "sst2",
    texts: int | None = None,
    share: float = 0.01,
    shares: list[float] = SHARES,
    batch: int = 64,
    only: str = "",
    join: list[Path] = [],  # noqa: B006
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    points = read(join)
    if quick:
        examples = EXAMPLES[:2]
    elif join:
        examples = []
    else:
        examples = read_examples(data / "sst2/dev.tsv", limit=texts)
    for folder in () if join else models:
        head = "classification" if task == "sst2" else "causal"
        loaded = load_model(folder, task=head, device=device)
        for name, part in planned(share, [0.05] if quick else shares):
            if only in name:
                method = attack(name, part, batch)
                if quick and isinstance(method.schedule, Rerank):
                    method = replace(
                        method, schedule=Rerank(rounds=2, prefixes=2, refine=1)
                    )
                points.append(measure(loaded, examples, name, part, method))
                known = replace(row(points[-1:], name, part), run=asdict(points[-1]))
                prefix = f"{folder.name}: " if len(models) > 1 else ""
                yield replace(known, what=f"{prefix}{known.what}")
    if join or len(models) > 1:
        for name, part in dict.fromkeys(
            (point.attack, point.share) for point in points
        ):
            yield row(points, name, part)
    change = max(point.control for point in points)
    yield Row(
        "largest change by masks that cut nothing", f"{change:g}", "0", change == 0
    )
    yield Row("models", str(len({point.model for point in points})))


def read(files: Sequence[Path]) -> list[Measured]:
    known = {
        each.name for each in fields(Measured)
    }  # runs also have a commit and a machine
    runs = trained.joined(files)
    return [
        Measured(**{name: run[name] for name in known & run.keys()}) for run in runs
    ]


def attack(name: str, share: float, batch: int) -> HackAttend:
    if name in OURS:
        return HackAttend.strongest(share, **OURS[name], batch=batch)
    return HackAttend.as_released(share, **ABLATIONS[name], batch=batch)


def planned(share: float, shares: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield every row at one share, then the other shares of the curve."""
    yield from ((name, share) for name in (*ABLATIONS, *OURS))
    yield from ((name, other) for name in CURVES for other in shares if other != share)


def measure(
    loaded: Loaded,
    examples: Sequence[Example],
    name: str,
    share: float,
    method: HackAttend,
) -> Measured:
    batches = Batches(loaded.model, loaded.tokenizer, examples, batch_size=16)
    found, seconds = show.timed(lambda: batches.attack(method))
    worst = max((outcome.worst_head for outcome in found.attacked), default=0.0)
    return Measured(
        Path(loaded.name).name,
        name,
        share,
        len(found.attacked),
        found.flips,
        found.share,
        worst,
        found.queries,
        seconds,
        found.control.change,
        {outcome.id: outcome.masked * outcome.flipped for outcome in found.attacked},
    )


def of(
    points: Sequence[Measured], name: str, share: float
) -> tuple[list[Measured], list[float]]:
    """Return the points of one attack, and the share of right answers that each flipped."""
    chosen = [point for point in points if (point.attack, point.share) == (name, share)]
    return chosen, [point.flips / max(1, point.right) for point in chosen]


def row(points: Sequence[Measured], name: str, share: float) -> Row:
    chosen, rates = of(points, name, share)
    details = (
        f"{' + '.join(f'{point.flips} of {point.right}' for point in chosen)}; flips took "
        f"{mean(point.cut for point in chosen):.2%} of all units, most "
        f"{max(point.worst_head for point in chosen):.1%} of a head; "
        f"{mean(point.queries for point in chosen):.0f} queries; "
        f"{sum(point.seconds for point in chosen):.0f} s"
    )
    models = {point.model for point in points}
    if len(chosen) < len(models):
        details = f"{len(chosen)} of {len(models)} models; {details}"
    return Row(f"{name}, {share:.1%}", trained.spread(rates), details=details)


if __name__ == "__main__":
    show.main(run)
