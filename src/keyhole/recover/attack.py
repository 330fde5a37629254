"""What an attack on a leak is given, and what it hands to the judge.

The threat model as types: an attack sees the weights, the tokenizer's table of special tokens and
the leak. It proposes ids and says what that cost; whether they are right is the judge's to say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import capture
from keyhole.models.pieces import decoded, written
from keyhole.recover.leaks import Leak

_TOKENS = 4096  # in one pass of the model
_KEPT: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)
Made = TypeVar("Made")


class TokenCount:
    """How many tokens of all leaks fit so far, which a progress bar shows."""

    def __init__(self, leaks: Sequence[Leak] = (), progress: Progress = silent) -> None:
        self._total = sum(leak.length or 0 for leak in leaks)
        self._progress = progress
        self._fitting: dict[int, int] = {}

    def set(self, number: int, tokens: int, note: str = "") -> None:
        """So many tokens of leak `number` fit."""
        self._fitting[number] = tokens
        self._progress(sum(self._fitting.values()), self._total, note)


@dataclass(frozen=True, eq=False)
class Target:
    """The attacker's knowledge: an open checkpoint and its tokenizer.

    `count` and `track` take where an attack stands: its tokens, and parts that it goes through.
    """

    model: Any
    tokenizer: Any
    parts: Anatomy
    count: TokenCount = field(default_factory=TokenCount)
    track: Track = untracked

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Target:
        return cls(model, tokenizer, anatomy(model))

    @property
    def vocabulary(self) -> int:
        return len(self.parts.table)

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after every text."""
        try:
            whole = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
            inside = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            kind = type(self.tokenizer).__name__
            raise InputError(f"expected a tokenizer, got {kind}") from error
        for start in range(len(whole) - len(inside) + 1):
            if whole[start : start + len(inside)] == inside:
                return whole[:start], whole[start + len(inside) :]
        return [], []

    def framed(self, length: int) -> Tensor:
        """The ids (n,) known before anything leaked: special tokens; -1 elsewhere."""
        before, after = self.frame()
        before = before[:length]
        after = after[: length - len(before)]
        unknown = [-1] * (length - len(before) - len(after))
        return torch.tensor([*before, *unknown, *after], device=self.parts.device)

    def pads(self) -> list[int]:
        """The ids that stand for no text: what fills a batch, the model's own first."""
        config = getattr(self.parts.base, "config", None)
        given = [
            getattr(config, "pad_token_id", None),
            getattr(self.tokenizer, "pad_token_id", None),
        ]
        return [int(token) for token in dict.fromkeys(given) if token is not None] or [0]

    @torch.no_grad()
    def rows(
        self,
        leak: Leak,
        ids: Tensor,
        mask: Tensor | None = None,
        each: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Tensor:
        """What this model would have leaked for `ids` (b, n), as rows (b, n, f).

        `mask` (n,) or (b, n) is 1 on text. `each` is applied to the rows of one pass at a time.
        """
        masks = torch.ones_like(ids) if mask is None else mask.to(ids).expand_as(ids)
        size = max(1, min(_TOKENS, self.parts.at_once(ids.shape[1])) // ids.shape[1])
        return torch.cat([
            each(leak.rows(capture(
                self.model, leak.exposure, ids=part, mask=None if mask is None else text
            )))
            for part, text in zip(ids.split(size), masks.split(size), strict=True)
        ])  # fmt: skip

    def nearest_tokens(
        self, misfit: Callable[[Tensor], Tensor], count: int, batch_size: int = _TOKENS
    ) -> Tensor:
        """The `count` tokens (…, count) of the vocabulary that fit best, the best first.

        `misfit` gives (…, c) for c tokens, of which there are `batch_size` at a time.
        """
        near, names = torch.zeros(0), torch.zeros(0, dtype=torch.long)
        for tokens in torch.arange(self.vocabulary, device=self.parts.device).split(batch_size):
            far = misfit(tokens)
            each = tokens.expand(far.shape)
            if len(near):
                far, each = torch.cat([near, far], -1), torch.cat([names, each], -1)
            near, kept = far.topk(min(count, far.shape[-1]), largest=False)
            names = each.gather(-1, kept)
        return names

    def remembered(self, what: str, key: Any, make: Callable[[], Made]) -> Made:
        """What was made of this model for `key` last time, or else is made now.

        Of every `what` the latest value is kept, as long as the model lives.
        """
        kept, key = _KEPT.setdefault(self.parts.base, {}), (key, self.parts.device)
        if what not in kept or kept[what][0] != key:
            kept.pop(what, None)  # a large model has no room for two
            kept[what] = (key, make())
        return kept[what][1]

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, list(ids))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Each token as it is written in the text."""
        return tuple(written(self.tokenizer, list(ids)))


@dataclass(frozen=True)
class Proposal:
    """The ids an attack would bet on, and what they cost; see TextRecovery for the counts.

    `excluded` says why no text of this model explains the leak, where an attack has shown that.
    """

    ids: list[int]
    passes: int = 0
    forwards: int = 0
    fitting: int = 0
    note: str = ""
    loss: float = float("inf")  # how far the attack itself thinks it is off; the judge decides
    tested: int = 0
    excluded: str = ""


class Attack(Protocol):
    """An attack proposes ids for each leak, in any order, as soon as it has them.

    `leaks` hold only text positions (trailing padding is gone). An attack that cannot do what it is
    asked raises `Unsuccessful(Status…, reason)`.
    """

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]: ...


@contextmanager
def solvable(model: nn.Module) -> Generator[None]:
    """Ends the attack inside with a status where an equation has no solution.

    Weights that overflow or are no numbers make decompositions fail, and torch then raises. It is
    the model that makes this attack impossible, and nothing follows for the exposure.
    """
    try:
        yield
    except LinAlgError as error:
        raise Unsuccessful(Status.NOT_APPLICABLE, _reason(model, error)) from error


def expect_numbers(model: nn.Module, given: Iterable[Tensor]) -> None:
    """Refuse a model that gives something else than numbers: nothing can leak from it."""
    if all(bool(each.isfinite().all()) for each in given):
        return
    name = _not_finite(model)
    cause = "they overflow" if name is None else f"its weights hold some, in {name}"
    raise InputError(f"the model gives NaN or infinity: {cause}")


def _reason(model: nn.Module, error: Exception) -> str:
    name = _not_finite(model)
    if name is not None:
        return f"the model's weights hold NaN or infinity, in {name}: nothing can be solved for"
    words = " ".join(str(error).split())[:200]
    return f"the equations of this attack have no solution for this model: {words}"


def _not_finite(model: nn.Module) -> str | None:
    """The first weight that holds something else than numbers."""
    weights = model.named_parameters()
    return next((name for name, each in weights if not bool(each.isfinite().all())), None)
