"""Training on masks that the attack finds: after HackAttend (arXiv 2402.16470).

    min_θ  E [ CE(f_θ(x), y) + λ KL(f_θ(x) ‖ f_θ(x; M)) ]

M cuts, in every head of every layer, the share α of its units whose removal raises the loss of a
label `t` most, to first order and with the row renormalised:

    a_ij/(1 − a_ij)·(Σ_l a_il g_il − g_ij)        g = ∂CE(f_θ(x), t)/∂A

The trap: with t = y the mask holds the label, the model learns to read it there, and what looks
like robustness is a leak (measured: success of the attack from 60% to 2%, and 5 points of clean
accuracy lost). So `t` is what the model predicts, or a random class; nothing that makes a mask is
given the labels. On texts that the model has learnt, its prediction is nearly the label: a random
class is the only choice that tells the model nothing, and the default.

In the divergence, f_θ(x) is a constant: the masked answer moves to the clean one, not the other way
round, which is what keeps clean accuracy. The clean pass serves both the loss and the gradient, and
one graph is held at a time.
Special tokens (where the batch says which they are) and padding are spared, as the attack does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.disrupt.rankings import removal
from keyhole.harden.defences.defence import (
    Batch,
    answer,
    cross_entropy,
    divergence,
    draw,
    positive,
    spared,
)
from keyhole.models.masking import Site, Untouched, rewriting

Ranked = tuple[Tensor, Tensor]  # the maps of a site, and the gradient there


@dataclass(frozen=True)
class AttackMasks:
    """`share` is α, `weight` λ; `rounds` ranks again after each part of the cut is made.

    A larger weight withstands more and costs clean accuracy: the default is the largest measured
    that keeps it within a point (benchmarks/harden.py). With FreeLB more can be had, see
    `Combined.strongest`.
    """

    share: float = 0.01
    label: Literal["random", "predicted"] = "random"
    weight: float = 0.35
    rounds: int = 1

    def __post_init__(self) -> None:
        positive(weight=self.weight)
        if not 0 <= self.share < 1:
            raise InputError(f"share must be at least 0 and below 1, got {self.share}")
        if self.label not in ("random", "predicted"):
            raise InputError(f"label must be random or predicted, got {self.label}")
        if self.rounds < 1:
            raise InputError(f"rounds must be 1 or more, not {self.rounds}")

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        cuts, scores = Cuts(), partial(answer, model, batch, draw(stream))
        with rewriting(model, cuts):
            clean = cuts.look(scores)
            target = self._target(clean, stream)
            ranked = cuts.gradients(clean, target, retain=True)
            # Now, while nothing is cut: gradient checkpointing runs the clean layers again, and
            # the clean graph is gone before the masked one is made.
            yield cross_entropy(clean, labels)
            self.attack(scores, cuts, ranked, target, tokens(batch))
            yield self.weight * divergence(clean.detach(), scores())

    def attack(
        self, scores: Callable[[], Tensor], cuts: Cuts, ranked: list[Ranked], target: Tensor,
        at: Tokens | None,
    ) -> None:  # fmt: skip
        """Make the cuts from what a clean pass showed; the labels are nowhere near."""
        for number in range(1, self.rounds + 1):
            if number > 1:
                ranked = cuts.gradients(cuts.look(scores), target)
            share, before = self.share * number / self.rounds, cuts.made or [None] * len(ranked)
            cuts.made = [
                strongest(a, g, share, at, made)
                for (a, g), made in zip(ranked, before, strict=True)
            ]

    def _target(self, clean: Tensor, stream: torch.Generator) -> Tensor:
        if self.label == "predicted":
            return clean.argmax(-1)
        classes = clean.shape[-1]
        drawn = torch.randint(classes, (len(clean),), generator=stream, device=stream.device)
        return drawn.to(clean.device)


class Cuts(Untouched):
    """Makes the cuts there are; keeps a pass's maps while it looks."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self._maps: list[Tensor] | None = None

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        del shape
        return self.made[site.index] if self.made else None

    def seen(self, site: Site, probabilities: Tensor) -> None:
        if self._maps is not None and site.index == len(self._maps):
            self._maps.append(probabilities)

    def look(self, scores: Callable[[], Tensor]) -> Tensor:
        self._maps = []
        return scores()

    def gradients(self, scores: Tensor, target: Tensor, retain: bool = False) -> list[Ranked]:
        """Each site's maps and the gradient of the target's loss at them; then it looks away."""
        loss = nn.functional.cross_entropy(scores, target, reduction="sum")
        maps = self._maps or []
        gradients = torch.autograd.grad(loss, maps, retain_graph=retain)
        self._maps = None
        return [(a.detach(), g) for a, g in zip(maps, gradients, strict=True)]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Which positions of each text are real, and which of them may be cut; (rows, n)."""

    real: Tensor
    free: Tensor


def tokens(batch: Batch) -> Tokens | None:
    """As the batch says; None for images."""
    if "input_ids" not in batch:
        return None
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).flatten(0, -2).bool()
    special = spared(batch)
    return Tokens(real, real if special is None else real & ~special)


def strongest(
    a: Tensor, g: Tensor, share: float, at: Tokens | None = None, before: Tensor | None = None
) -> Tensor:
    """The units to cut of maps (rows, heads, q, k): in each, ⌊share·units⌋ at most, at least one.

    Only units whose removal raises the loss, and those that were cut `before`.
    """
    exists = (a > 0) if before is None else (a > 0) | before
    free = exists
    if at is not None and at.real.shape == (a.shape[0], a.shape[-1]):
        free = free & at.free[:, None, None, :]
        if a.shape[-2] == a.shape[-1]:
            exists, free = exists & at.real[:, None, :, None], free & at.free[:, None, :, None]
    effect = removal(a, g).masked_fill(~free, 0)
    if before is not None:
        effect = effect.masked_fill(before, torch.inf)
    allowed = (share * exists.sum((2, 3))).floor().clamp(min=1 if share > 0 else 0)  # (rows, heads)
    most = int(allowed.max())
    if most == 0:
        return torch.zeros_like(a, dtype=torch.bool)
    values, places = effect.flatten(2).topk(most, -1)
    chosen = (torch.arange(most, device=a.device) < allowed.unsqueeze(-1)) & (values > 0)
    flat = torch.zeros_like(effect.flatten(2), dtype=torch.bool).scatter(2, places, chosen)
    return flat.unflatten(2, a.shape[2:])
