"""Errors that people can act on, and checks of the numbers and names that callers give.

An attack that does not succeed is no error: it ends with a Status (core/status.py).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, cast, get_args


class KeyholeError(Exception):
    """A failure whose message is one line that says what went wrong and what to do."""


class InputError(KeyholeError, ValueError):
    """Something that the caller gave cannot be used. The command line exits with 2."""


class MissingExtra(InputError):
    """A package is not installed that only some of Keyhole needs; `extra` installs it."""

    def __init__(self, message: str, extra: str) -> None:
        super().__init__(
            message, extra
        )  # both, because unpickling passes args to __init__
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.args[0]}: pip install 'keyhole[{self.extra}]'"


def optional(
    module: str,
    message: str,
    extra: str,
) -> Any:
    """Return a module that only some of Keyhole needs; raise MissingExtra if it is not installed.

    It is imported by its name, because it may be missing and may have no types.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(message, extra) from error


_IN_EXTRA_MODELS = {
    "accelerate",
    "gguf",
    "httpcore",
    "httpx",
    "numpy",
    "scipy",
    "torch",
    "transformers",
}


def missing_extra(error: BaseException) -> MissingExtra | None:
    """Return the error to show if an import failed because the extra `models` is missing."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _IN_EXTRA_MODELS:
        return None
    return MissingExtra(f"this needs {package}, which is not installed", "models")


SEEDS = (
    2**32
)  # so that numbers computed from a seed, such as one per epoch, fit into 64 bits
MOST = 2**63 - 1  # the largest whole number of 64 bits


def expect_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise InputError(f"a seed must be from 0 to {SEEDS - 1:,}, not {seed}")


def expect_count(
    name: str,
    value: int | None,
    least: int = 1,
    most: int = MOST,
) -> None:
    """Raise if a whole number is out of range; None means that it was not given."""
    if value is None or least <= value <= most:
        return
    if value < least:
        raise InputError(f"{name} must be {least} or more, not {value}")
    raise InputError(f"{name} must be at most {most:,}, not {value}")


def expect_number(
    name: str,
    value: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raise unless a number is finite and in range; None means that it was not given."""
    if value is None:
        return
    if least is not None and not value >= least:  # also true of NaN
        raise InputError(f"{name} must be {least:g} or more, not {value}")
    if above is not None and not value > above:
        raise InputError(f"{name} must be above {above:g}, not {value}")
    if most is not None and not value <= most:
        raise InputError(f"{name} must be at most {most:g}, not {value}")
    if below is not None and not value < below:
        raise InputError(f"{name} must be below {below:g}, not {value}")
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, not {value}")


def expect_among(
    name: str,
    value: object,
    known: Any,
) -> None:
    """Raise if a value is not one of `known`, a Literal type or a collection of names."""
    names = get_args(known) or tuple(cast("Iterable[str]", known))
    if value not in names:
        raise InputError(f"{name} must be one of {', '.join(names)}, not {value}")


def expect_keys(
    given: Iterable[str],
    keys: Collection[str],
    where: str,
) -> None:
    """Raise if a file has an unknown key, and suggest the key that was probably meant."""
    for key in given:
        if key not in keys:
            near = get_close_matches(key, keys, 1, 0.5)
            if near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = f"it takes {', '.join(sorted(keys))}"
            raise InputError(f"{key[:40]} has no meaning in {where}: {hint}")


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message, shortened to fit into one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
