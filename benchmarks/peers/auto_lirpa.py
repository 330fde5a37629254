"""auto_LiRPA and Keyhole: what any k cut units of a layer leave of an answer's margin, at least.

auto_LiRPA (arXiv 2002.12920) is run from its repository, which is not part of this one:

    git clone https://github.com/Verified-Intelligence/auto_LiRPA
    git -C auto_LiRPA checkout a050a3d
    python benchmarks/peers/auto_lirpa.py --checkout auto_LiRPA

It bounds the same margin by CROWN (`backward`), with the cuts of one layer as an input of zeros of
which k become one (its `PerturbationL0Norm`), in float32. The classifier that ships with Keyhole,
sentences of SST-2's dev set. `found` is the least margin that cutting the worst unit, again and
again, leaves: no bound may lie above it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole.data import Batch, encode, read_examples
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import survey
from keyhole.lab.certificates import certify
from keyhole.lab.written_out import Classifier, embedded, written_out
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER
from show import Row

PEER = "https://github.com/Verified-Intelligence/auto_LiRPA"
COMMIT = "a050a3d"
AT_ONCE = 128  # masks in one pass


class Margins(nn.Module):
    """The label's lead over each other class, from layer `start` on, as the cuts m (1, units)."""

    def __init__(
        self, classifier: Any, x: Tensor, free: Tensor, label: int, start: int, gelu: Any
    ) -> None:
        super().__init__()
        self.gelu = gelu
        self.layers, self.x, self.label = classifier.layers[start:], x.float(), label
        self.pooler, self.classes = classifier.pooler, classifier.classes
        with torch.no_grad():
            _, _, v, s = self.layers[0].scores(x)
        self.a, self.v = s.softmax(-1).float(), v.float()
        places = free.flatten().nonzero().flatten()
        self.spread = torch.zeros(len(places), free.numel())
        self.spread[torch.arange(len(places)), places] = 1.0

    def forward(self, m: Tensor) -> Tensor:
        kept = self.a * (1 - (m @ self.spread).reshape(-1, *self.a.shape))
        x = self.rest(self.layers[0], self.x, (kept / kept.sum(-1, keepdim=True)) @ self.v)
        count, n, _ = self.a.shape
        for layer in self.layers[1:]:
            q, k, v = (
                (x @ W.float().flatten(0, 1).T + b.float().flatten())
                .reshape(-1, n, count, W.shape[1])
                .transpose(1, 2)
                for W, b in (layer.query, layer.key, layer.value)
            )
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            x = self.rest(layer, x, scores.softmax(-1) @ v)
        first = torch.tanh(x[:, 0] @ self.pooler[0].float().T + self.pooler[1].float())
        weight, bias = (part.float() for part in self.classes)
        others = [c for c in range(len(weight)) if c != self.label]
        return first @ (weight[self.label] - weight[others]).T + (bias[self.label] - bias[others])

    def rest(self, layer: Any, x: Tensor, heads: Tensor) -> Tensor:
        weight, bias = layer.output
        joined = heads.transpose(1, 2).reshape(
            -1, heads.shape[2], weight.shape[0] * weight.shape[2]
        )
        y = joined @ weight.float().transpose(1, 2).flatten(0, 1) + (bias.float() + x)
        u = self.normed(layer.first, y)
        wide = u @ layer.inner[0].float().T + layer.inner[1].float()
        fed = self.gelu(wide) @ layer.outer[0].float().T + layer.outer[1].float() + u
        return self.normed(layer.second, fed)

    def normed(self, norm: Any, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        size = ((centred * centred).mean(-1, keepdim=True) + norm.least).sqrt()
        return centred / size * norm.gain.float() + norm.shift.float()


def least_in_layers(model: Any, batch: Batch, label: int, most: int) -> list[list[float]]:
    """The margin that 1, 2, … `most` units of each layer leave, each the worst after the others."""
    question = ask(model, batch, torch.tensor([label]))
    units = survey(model, question)
    free = torch.stack([units.at(units.free, place)[0, 0] for place in units.places])
    types = batch.get("token_type_ids")
    x = embedded(model, question.inputs["input_ids"][0], None if types is None else types[0])
    classifier = written_out(model)
    with torch.no_grad():
        _, traces = classifier.passed(x)
        return [
            _one_by_one(classifier, trace.x, free[number], label, number, most)
            for number, trace in enumerate(traces)
        ]


def _one_by_one(
    classifier: Classifier, x: Tensor, free: Tensor, label: int, layer: int, most: int
) -> list[float]:
    cut, left = torch.zeros_like(free), list[float]()
    for _ in range(most):
        best: tuple[float, Tensor] = (torch.inf, cut)
        for part in (free & ~cut).nonzero().split(AT_ONCE):
            masks = cut.repeat(len(part), 1, 1, 1)
            masks[torch.arange(len(part)), part[:, 0], part[:, 1], part[:, 2]] = True
            logits, _ = classifier.passed(x, masks, layer)
            lead = logits[:, label, None] - logits
            lead[:, label] = torch.inf
            margins = lead.amin(1)
            best = min(best, (float(margins.min()), masks[margins.argmin()]), key=lambda b: b[0])
        cut = best[1]
        left.append(min([best[0], *left]))  # up to so many: fewer may do more
    return left


def run(
    quick: bool,
    checkout: Path | None = None,
    data: Path = subjects.DATA,
    texts: int = 8,
    tokens: int = 8,
    units: int = 2,
    layer: int = 2,
) -> Iterator[Row]:
    if checkout is None:
        raise SystemExit(f"clone {PEER} at {COMMIT} and give its folder as --checkout")
    sys.path.insert(0, str(checkout))
    loaded = load_model(FOLDER, task="classification")
    short = [
        each
        for each in read_examples(data / "sst2/dev.tsv")
        if len(loaded.tokenizer(each.text)["input_ids"]) <= tokens
    ]
    items = [one(loaded, each, units, layer) for each in short[: 1 if quick else texts]]
    right = [item for item in items if item is not None]
    proved = {
        side: sum(item[side]["bound"] is not None and item[side]["bound"] > 0 for item in right)
        for side in ("auto_lirpa", "keyhole")
    }
    seconds = {side: median(item[side]["seconds"] for item in right) for side in proved}
    above = sum((item["auto_lirpa"]["bound"] or 0.0) > item["found"] for item in right)
    yield Row(
        f"layer {layer + 1}, {units} units, {len(right)} texts",
        f"proved: auto_LiRPA {proved['auto_lirpa']}, Keyhole {proved['keyhole']}; seconds: "
        f"{seconds['auto_lirpa']:.1f}, {seconds['keyhole']:.1f}",
        details=f"{above} of auto_LiRPA's bounds above a margin that was found",
        run={"peer": PEER, "peer_commit": COMMIT, "items": right},
    )


def one(loaded: Loaded, example: Any, k: int, start: int) -> dict[str, Any] | None:
    """One text: both bounds of what k units of a layer leave, and what a search found."""
    from auto_LiRPA import BoundedModule, BoundedTensor  # type: ignore[import-not-found]
    from auto_LiRPA.operators.gelu import GELU  # type: ignore[import-not-found]
    from auto_LiRPA.perturbations import PerturbationL0Norm  # type: ignore[import-not-found]

    batch, _ = encode(loaded.tokenizer, [example])
    proof, ours = show.timed(lambda: certify(loaded.model, batch, example.label, k))
    if not proof.right:
        return None
    question = ask(loaded.model, batch, torch.tensor([example.label]))
    units = survey(loaded.model, question)
    free = units.at(units.free, units.places[start])[0, 0]
    classifier = written_out(loaded.model)
    with torch.no_grad():
        x = embedded(loaded.model, question.inputs["input_ids"][0], None)
        _, traces = classifier.passed(x)
    module = Margins(classifier, traces[start].x, free, example.label, start, GELU())
    none = torch.zeros(1, len(module.spread))
    cuts = BoundedTensor(none, PerturbationL0Norm(eps=k))

    def bounded() -> float | None:
        try:
            bounds = BoundedModule(module, none).compute_bounds(x=(cuts,), method="backward")
        except AssertionError:  # a variance whose lower bound is negative: nothing is proved
            return None
        return float(bounds[0].min())

    theirs, took = show.timed(bounded)
    return {
        "text": example.text, "margin": proof.margin,
        "found": least_in_layers(loaded.model, batch, example.label, k)[start][k - 1],
        "auto_lirpa": {"bound": theirs, "seconds": took},
        "keyhole": {"bound": proof.layers[start], "seconds": ours},
    }  # fmt: skip


if __name__ == "__main__":
    show.main(run)
