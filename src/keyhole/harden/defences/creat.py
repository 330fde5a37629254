"""CreAT: *Toward Adversarial Training on Contextualized Language Representation*, arXiv 2305.04557.

    min_θ  E ½ [ CE(f_θ(X), y) + CE(f_θ(X + δ), y) ]        ‖δ‖_F ≤ ε
    δ_0 ~ N(0, σ²)        δ_{t+1} = Π_ε(δ_t + α g_t/‖g_t‖_F)
    g_t = ∂/∂δ [ CE(f_θ(X + δ_t), y) − τ cos(h_θ(X + δ_t), h_θ(X)) ]

with h_θ the last hidden state of the first token: the perturbation also turns the
encoder's representation of the text. This follows the code released with HackAttend.
Both passes use the same dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.harden.defences.defence import (
    Batch,
    answer,
    ascended,
    draw,
    noise,
    nonnegative,
)


@dataclass(frozen=True)
class CreAT:
    """`steps` of ascent of size `rate` (α) from `start` (σ), in `radius` (ε); `turn` is τ."""

    steps: int = 1
    rate: float = 0.1
    radius: float = 0.1
    turn: float = 1.0
    start: float = 0.01

    def __post_init__(self) -> None:
        nonnegative(
            steps=self.steps,
            rate=self.rate,
            radius=self.radius,
            turn=self.turn,
            start=self.start,
        )

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        seed = draw(stream)
        delta = noise(model, batch, stream, normal=True) * self.start
        with torch.no_grad():
            _, clean = _states(model, batch, seed, torch.zeros_like(delta))
        for _ in range(self.steps):
            delta = self._ascend(model, batch, labels, delta, clean, seed)
        for each in (torch.zeros_like(delta), delta):
            yield cross_entropy(_states(model, batch, seed, each)[0], labels) / 2

    def _ascend(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        delta: Tensor,
        clean: Tensor,
        seed: int,
    ) -> Tensor:
        delta = delta.requires_grad_(True)
        scores, states = _states(model, batch, seed, delta)
        near = nn.functional.cosine_similarity(states, clean, dim=-1).mean()
        (gradient,) = torch.autograd.grad(
            cross_entropy(scores, labels) - self.turn * near, delta
        )
        return ascended(delta, gradient, self.rate, self.radius)


def _states(
    model: nn.Module, batch: Batch, seed: int, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores and the first token's last hidden state, for perturbed embeddings."""
    found: list[Tensor] = []
    encoder = cast("nn.Module", cast("Any", model).base_model)
    handle = encoder.register_forward_hook(
        lambda _module, _args, output: found.append(output[0][:, 0].float())
    )
    try:
        scores = answer(model, batch, seed, delta)
    finally:
        handle.remove()
    return scores, found[0]
