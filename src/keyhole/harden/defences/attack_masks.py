"""Train on masks like those of the attack: after HackAttend (arXiv 2402.16470).

    min_θ  E [ CE(f_θ(x), y) + λ KL(f_θ(x) ‖ f_θ(x; M)) ]

In every head of every layer, M cuts the share α of the units whose removal raises the
loss of a label `t` most, to first order and with the row renormalised:

    a_ij/(1 − a_ij)·(Σ_l a_il g_il − g_ij)        g = ∂CE(f_θ(x), t)/∂A

With t = y the mask reveals the label and the model learns to read it there, which looks
like robustness (measured: the attack's success falls from 60% to 2%, and clean accuracy
by 5 points). So `t` is a random class, or the predicted class; the code that makes
masks never gets the labels. A random class is the default, because on texts that the
model has learnt its prediction is nearly always the label.

In the divergence f_θ(x) is a constant, so the masked answer moves towards the clean
one. This preserves clean accuracy. The clean pass serves both the loss and the
gradient, and only one graph is in memory at a time. Padding and the special tokens that
the batch marks are spared, as in the attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import expect_among, expect_count, expect_number
from keyhole.disrupt.rankings import removal
from keyhole.harden.defences.defence import (
    Batch,
    divergence,
    passes,
    spared,
)
from keyhole.models.masking import Site, Untouched, rewriting

Ranked = tuple[Tensor, Tensor]  # the maps of a site, and the gradient there


@dataclass(frozen=True)
class AttackMasks:
    """`share` is α, `weight` λ; the units are cut in `rounds` parts and ranked before each.

    A larger weight gives more robustness and less clean accuracy. The default is the
    largest weight measured that costs at most one point of accuracy
    (benchmarks/harden.py). In combination with FreeLB it can be larger
    (`Combined.strongest`).
    """

    share: float = 0.01
    label: Literal["random", "predicted"] = "random"
    weight: float = 0.35
    rounds: int = 1

    def __post_init__(self) -> None:
        expect_number("weight", self.weight, least=0)
        expect_number("share", self.share, least=0, below=1)
        expect_among("label", self.label, ("random", "predicted"))
        expect_count("rounds", self.rounds)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        cuts = Cuts()
        scores = passes(model, batch, stream)
        with rewriting(model, cuts):
            clean = cuts.look(scores)
            target = self._target(clean, stream)
            ranked = cuts.gradients(clean, target, retain=True)
            # Yielded before anything is cut, because gradient checkpointing runs the
            # clean layers again. It also frees the clean graph before the masked one is
            # built.
            yield cross_entropy(clean, labels)
            self.attack(scores, cuts, ranked, target, tokens(batch))
            yield self.weight * divergence(clean.detach(), scores())

    def attack(
        self,
        scores: Callable[[], Tensor],
        cuts: Cuts,
        ranked: list[Ranked],
        target: Tensor,
        at: Tokens | None,
    ) -> None:
        """Make the cuts from the maps and gradients of a clean pass, without the labels."""
        for number in range(1, self.rounds + 1):
            if number > 1:
                ranked = cuts.gradients(cuts.look(scores), target)
            share = self.share * number / self.rounds
            before = cuts.made or [None] * len(ranked)
            cuts.made = [
                strongest(a, g, share, at, made)
                for (a, g), made in zip(ranked, before, strict=True)
            ]

    def _target(self, clean: Tensor, stream: torch.Generator) -> Tensor:
        if self.label == "predicted":
            return clean.argmax(-1)
        classes = clean.shape[-1]
        size = (len(clean),)
        drawn = torch.randint(classes, size, generator=stream, device=stream.device)
        return drawn.to(clean.device)


class Cuts(Untouched):
    """Cuts the units in `made`, and records the maps of a pass that `look` runs."""

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

    def gradients(
        self,
        scores: Tensor,
        target: Tensor,
        retain: bool = False,
    ) -> list[Ranked]:
        """Return each recorded map with the gradient of the target's loss, and stop recording."""
        loss = cross_entropy(scores, target, reduction="sum")
        maps = self._maps or []
        gradients = torch.autograd.grad(loss, maps, retain_graph=retain)
        self._maps = None
        return [(a.detach(), g) for a, g in zip(maps, gradients, strict=True)]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The real tokens of each text, and those that may be cut; (rows, n)."""

    real: Tensor
    free: Tensor


def tokens(batch: Batch) -> Tokens | None:
    """Return the real and free tokens of a batch, or None for images."""
    if "input_ids" not in batch:
        return None
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).flatten(0, -2).bool()
    special = spared(batch)
    return Tokens(real, real if special is None else real & ~special)


def strongest(
    a: Tensor,
    g: Tensor,
    share: float,
    at: Tokens | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Choose the units to cut in maps (rows, heads, q, k): at most ⌊share·units⌋, or one, in each.

    Units are chosen if they were cut `before` or if their removal raises the loss.
    """
    exists = (a > 0) if before is None else (a > 0) | before
    free = exists
    if at is not None and at.real.shape == (a.shape[0], a.shape[-1]):
        free = free & at.free[:, None, None, :]
        if a.shape[-2] == a.shape[-1]:
            exists = exists & at.real[:, None, :, None]
            free = free & at.free[:, None, :, None]
    effect = removal(a, g).masked_fill(~free, 0)
    if before is not None:
        effect = effect.masked_fill(before, torch.inf)
    allowed = (
        (share * exists.sum((2, 3))).floor().clamp(min=int(share > 0))
    )  # (rows, heads)
    most = int(allowed.max())
    if most == 0:
        return torch.zeros_like(a, dtype=torch.bool)
    values, places = effect.flatten(2).topk(most, -1)
    within = torch.arange(most, device=a.device) < allowed.unsqueeze(-1)
    none = torch.zeros_like(effect.flatten(2), dtype=torch.bool)
    flat = none.scatter(2, places, within & (values > 0))
    return flat.unflatten(2, a.shape[2:])
