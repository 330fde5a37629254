"""The ways a run can be refused. Everything else is a Status (see core/status.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, cast, get_args


class KeyholeError(Exception):
    """A failure whose message is one line a person can act on."""


class InputError(KeyholeError, ValueError):
    """What the caller gave cannot be used, and why, in one line. The CLI exits with 2."""


class MissingExtra(InputError):
    """A package that only some of Keyhole needs is not installed; `extra` brings it."""

    def __init__(self, message: str, extra: str) -> None:
        super().__init__(message, extra)  # both: an exception is made again from its arguments
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.args[0]}: pip install 'keyhole[{self.extra}]'"


# What the extra `models` brings; nothing that attacks works without it.
_OF_MODELS = {"accelerate", "gguf", "httpcore", "httpx", "numpy", "scipy", "torch", "transformers"}


def missing_extra(error: BaseException) -> MissingExtra | None:
    """The extra that an import failed for the lack of, if it was that."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _OF_MODELS:
        return None
    return MissingExtra(f"this needs {package}, which is not installed", "models")


# What a number that a caller gives must be: one line that says what it must be.
#
# Every whole number fits into 64 bits, and a seed into 32, so that what is computed from one (a
# seed for each epoch, a generator's state) fits as well.

SEEDS = 2**32
MOST = 2**63 - 1


def expect_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise InputError(f"a seed is from 0 to {SEEDS - 1:,}, not {seed}")


def expect_count(name: str, value: int | None, least: int = 1, most: int = MOST) -> None:
    """A whole number in a range; None is a number that was not given."""
    if value is None or least <= value <= most:
        return
    if value < least:
        raise InputError(f"{name} must be {least} or more, not {value}")
    raise InputError(f"{name} must be at most {most:,}, not {value}")


def expect_number(
    name: str, value: float | None, *, least: float | None = None, above: float | None = None
) -> None:
    """A finite number, at least `least` or larger than `above`; None was not given."""
    if value is None:
        return
    if least is not None and not (math.isfinite(value) and value >= least):
        raise InputError(f"{name} must be {least:g} or more, not {value}")
    if above is not None and not (math.isfinite(value) and value > above):
        raise InputError(f"{name} must be above {above:g}, not {value}")
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, not {value}")


def expect_among(name: str, value: object, known: Any) -> None:
    """`known` is a Literal type, or a collection of names."""
    names = get_args(known) or tuple(cast("Iterable[str]", known))
    if value not in names:
        raise InputError(f"{name} must be one of {', '.join(names)}, not {value}")


def expect_keys(given: Iterable[str], keys: Collection[str], where: str) -> None:
    """Refuse a key of a file that is none of these, with the one that was probably meant."""
    for key in given:
        if key not in keys:
            near = get_close_matches(key, keys, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(keys))}"
            raise InputError(f"{key[:40]} has no meaning in {where}: {hint}")


def first_line(error: BaseException) -> str:
    """What a library says went wrong, as much of it as fits into a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
