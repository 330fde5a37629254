"""Defences: what a service does to what it gives out, as values of one type.

A `Defence` says what it changes, and has its parameters. Those that are None, False or
empty are not applied; the others are applied

    to answers   of an endpoint, and its questions     `Defended` in oracle/defences.py
    to states    hidden states, caches, logits         `degrade` in recover/simulate.py
    to vectors   that a store keeps                    `Defence.change`
    to updates   of a client that trains               `update_of` in recover/gradients/update.py

All Gaussian noise is added by `add_noise`, and all rounding to fewer bits is in ROUNDINGS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.core.options import settings, types_of


class Changes(StrEnum):
    """What a defence changes before anybody sees it."""

    ANSWERS = "answers"
    STATES = "states"
    VECTORS = "vectors"
    UPDATES = "updates"


@dataclass(frozen=True, kw_only=True)
class Defence:
    """A defence of what it `changes`.

    A server refuses sequences of fewer than `min_tokens` or more than `max_tokens`
    tokens, and questions unlike those of clients whose tokens have about `usual_norm`.
    It shortens tokens to `max_norm`, reduces answers to signs (`sign_only`), and lets a
    client send `max_queries`, at a `rate` per second.

    `noise` is the largest error of an answer, the same whenever a question is repeated;
    `fresh_noise` is drawn each time. `noise` is the standard deviation of what is added
    to vectors and updates, and to states in units of their own.

    `forms` and `precision` are those of `degrade`.
    """

    name: str = ""
    changes: Changes = Changes.ANSWERS
    seed: int = 0
    min_tokens: int | None = None
    max_tokens: int | None = None
    usual_norm: float | None = None
    max_norm: float | None = None
    noise: float | None = None
    fresh_noise: float | None = None
    decimals: int | None = None
    sign_only: bool = False
    max_queries: int | None = None
    rate: float | None = None
    forms: tuple[str, ...] = ()
    precision: str = "float32"

    def __post_init__(self) -> None:
        expect_seed(self.seed)
        expect_count("min_tokens", self.min_tokens)
        expect_count("max_tokens", self.max_tokens)
        expect_count("decimals", self.decimals, 0, 15)
        expect_number("usual_norm", self.usual_norm, above=0)
        expect_number("max_norm", self.max_norm, above=0)
        expect_number("noise", self.noise, least=0)
        expect_number("fresh_noise", self.fresh_noise, least=0)
        if self.max_tokens is not None and (self.min_tokens or 1) > self.max_tokens:
            raise InputError(
                "min_tokens must not exceed max_tokens: they are "
                f"{self.min_tokens} and {self.max_tokens}"
            )

    @classmethod
    def of_answers(cls, words: Iterable[str]) -> Defence:
        """Return the defence of answers that words such as "decimals=3" state."""
        types = types_of(cls)
        known = {name: types[name] for name in ("seed", *ANSWERS)}
        return cls(**settings([*words], known, "a server"))

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of a server that are applied, by name."""
        given = {name: getattr(self, name) for name in ANSWERS}
        return {
            name: value
            for name, value in given.items()
            if value is not None and value is not False
        }

    def __str__(self) -> str:
        """Return what a server does, in words."""
        given = self.parameters.items()
        return ", ".join(ANSWERS[name].format(value) for name, value in given)

    def change(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """Return states or vectors with noise, and rounded."""
        if self.noise:
            sigma: Any = self.noise
            if self.changes is Changes.STATES:
                sigma = sigma * rows[rows.isfinite()].std()
            rows = add_noise(rows, sigma, stream)
        return ROUNDINGS[self.precision](rows)


ANSWERS = {  # the parameters of a server, in words
    "min_tokens": "{} tokens or more",
    "max_tokens": "{} tokens at most",
    "usual_norm": "tokens of norm about {:g}",
    "max_norm": "tokens of norm {:g} at most",
    "noise": "answers within ±{:g}",
    "fresh_noise": "answers within ±{:g}, anew each time",
    "decimals": "answers rounded to {} decimals",
    "sign_only": "signs only",
    "max_queries": "{:,} queries at most",
    "rate": "{:g} queries a second",
}


def add_noise(
    tensor: Tensor,
    sigma: Any,
    stream: torch.Generator,
) -> Tensor:
    """Return the tensor with Gaussian noise of this standard deviation."""
    return tensor + sigma * torch.randn(tensor.shape, generator=stream).to(tensor)


def _steps(most: int) -> Callable[[Tensor], Tensor]:
    """Return a rounding to whole steps from −most to most, with one step for each row."""

    def rounded(tensor: Tensor) -> Tensor:
        step = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
        return (tensor / step).round() * step

    return rounded


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": Tensor.float,
    "bfloat16": lambda tensor: tensor.bfloat16().float(),
    "float16": lambda tensor: tensor.half().float(),
    "int8": _steps(127),
    "int4": _steps(7),
    "binary": lambda tensor: torch.where(tensor > 0, 1.0, -1.0),
}
