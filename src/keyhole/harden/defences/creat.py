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
    ascended,
    expect_nonnegative,
    noise,
    passes,
)
from keyhole.models.hooks import hooks


@dataclass(frozen=True)
class CreAT:
    """`steps` of ascent of size `rate` (α) from `start` (σ), in `radius` (ε); `turn` is τ."""

    steps: int = 1
    rate: float = 0.1
    radius: float = 0.1
    turn: float = 1.0
    start: float = 0.01

    def __post_init__(self) -> None:
        expect_nonnegative(self)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        scores = passes(model, batch, stream)
        delta = noise(model, batch, stream, normal=True) * self.start
        states: list[Tensor] = []  # of the first token, one for each pass

        def record(
            _module: nn.Module,
            _args: Any,
            output: Any,
        ) -> None:
            states.append(output[0][:, 0].float())

        with hooks((cast("Any", model).base_model.register_forward_hook, record)):
            with torch.no_grad():
                scores()
            clean = states.pop()
            for _ in range(self.steps):
                delta.requires_grad_(True)
                loss = cross_entropy(scores(delta), labels)
                near = nn.functional.cosine_similarity(states.pop(), clean, dim=-1)
                (gradient,) = torch.autograd.grad(loss - self.turn * near.mean(), delta)
                delta = ascended(delta, gradient, self.rate, self.radius)
        for perturbation in (None, delta):
            yield cross_entropy(scores(perturbation), labels) / 2
