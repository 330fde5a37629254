"""What attacks check about their hyperparameters: one line that says what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast, get_args

from keyhole.core.errors import InputError


def expect_among(name: str, value: object, known: Any) -> None:
    """`known` is a Literal type, or a collection of names."""
    names = get_args(known) or tuple(cast("Iterable[str]", known))
    if value not in names:
        raise InputError(f"expected {name} among {', '.join(names)}, got {value}")


def expect_least(minimum: int, /, **values: int) -> None:
    """Every value is at least the minimum."""
    for name, value in values.items():
        if value < minimum:
            raise InputError(f"expected {name} of at least {minimum}, got {value}")
