"""The input of an attack on a leak, and the proposal that it hands to the judge.

These types are the threat model. An attack sees the weights, the tokenizer's special
tokens and the leak. It proposes token ids and counts what that cost. Only the judge
decides whether they are right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.anatomy import Anatomy, anatomy, not_finite
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.models.pieces import decoded, written
from keyhole.recover.leaks import Leak

TOKENS_PER_PASS = 4096  # at most, in one pass of the model
_REMEMBERED: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)
Made = TypeVar("Made")


class TokenCount:
    """Counts how many tokens of all leaks fit so far, for a progress bar."""

    def __init__(self, leaks: Sequence[Leak] = (), progress: Progress = silent) -> None:
        self._total = sum(leak.length or 0 for leak in leaks)
        self._progress = progress
        self._fitting: dict[int, int] = {}

    def set(
        self,
        number: int,
        tokens: int,
        note: str = "",
    ) -> None:
        """Report that `tokens` tokens of leak `number` fit."""
        self._fitting[number] = tokens
        note = ", ".join(filter(None, ("tokens", note)))
        self._progress(sum(self._fitting.values()), self._total, note)


@dataclass(frozen=True, eq=False)
class Target:
    """The attacker's knowledge: an open checkpoint and its tokenizer.

    An attack reports the tokens that fit to `count`, which passes their sum to
    `progress`, and parts of its work to `track`.
    """

    model: Any
    tokenizer: Any
    parts: Anatomy
    progress: Progress = silent
    track: Track = untracked
    count: TokenCount = field(default_factory=TokenCount)

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Target:
        return cls(model, tokenizer, anatomy(model))

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def table(self) -> Tensor:
        """The token embeddings (V, e) in float32."""
        return self.parts.table.float()

    @property
    def vocabulary(self) -> int:
        return len(self.parts.table)

    @property
    def special(self) -> set[int]:
        """The ids that stand for no part of a text."""
        return set(getattr(self.tokenizer, "all_special_ids", []))

    @property
    def kind(self) -> str:
        return "a causal model" if self.parts.causal else "an encoder"

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after every text."""
        try:
            whole = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
            inside = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            kind = type(self.tokenizer).__name__
            raise InputError(f"expected a tokenizer, got {kind}") from error
        for start in range(len(whole) - len(inside) + 1):
            end = start + len(inside)
            if whole[start:end] == inside:
                return whole[:start], whole[end:]
        return [], []

    def framed(self, length: int) -> Tensor:
        """Return the ids (n,) known before any leak: the special tokens, and -1 between them."""
        before, after = self.frame()
        before = before[:length]
        after = after[: length - len(before)]
        unknown = [-1] * (length - len(before) - len(after))
        return self.tensor([*before, *unknown, *after])

    def tensor(self, numbers: Any) -> Tensor:
        """Return numbers, such as the ids of texts, as a tensor on the model's device."""
        return torch.tensor(numbers, device=self.device)

    def branches(self, start: int = 0) -> Branches:
        """Return an empty cache for one text, after `start` positions of padding."""
        return Branches(self.model, self.tensor([start]))

    def pads(self) -> list[int]:
        """Return the ids that pad a batch, the model's own first."""
        owners = (getattr(self.parts.base, "config", None), self.tokenizer)
        given = [getattr(owner, "pad_token_id", None) for owner in owners]
        pads = [int(token) for token in given if token is not None]
        return list(dict.fromkeys(pads)) or [0]

    def batch_size(self, length: int) -> int:
        """Return how many texts of `length` tokens go through the model in one pass."""
        return max(1, min(TOKENS_PER_PASS, self.parts.at_once(length)) // length)

    @torch.no_grad()
    def exposed(
        self,
        exposure: Exposure,
        ids: Tensor,
        mask: Tensor | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Yield what this model exposes of texts `ids` (b, n), a batch at a time.

        `mask` (n,) or (b, n) is 1 on text.
        """
        size = self.batch_size(ids.shape[1])
        masks = None if mask is None else mask.to(ids).expand_as(ids)
        for start in range(0, len(ids), size):
            some = slice(start, start + size)
            own = None if masks is None else masks[some]
            yield capture(self.model, exposure, ids=ids[some], mask=own)

    def rows(
        self,
        leak: Leak,
        ids: Tensor,
        mask: Tensor | None = None,
        each: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Tensor:
        """Return what this model would have leaked for `ids` (b, n), as rows (b, n, f).

        `mask` (n,) or (b, n) is 1 on text. `each` is applied to the rows of every pass.
        """
        batches = self.exposed(leak.exposure, ids, mask)
        return torch.cat([each(leak.rows(given)) for given in batches])

    def slopes(
        self,
        exposure: Exposure,
        words: Tensor,
        of: Callable[[Mapping[str, Tensor]], Tensor],
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return numbers (b,) `of` what is exposed for word embeddings (b, n, e), and gradients.

        `mask` (b, n) is 1 on text.
        """
        with torch.enable_grad():
            words = words.detach().requires_grad_()
            numbers = of(capture(self.model, exposure, embeddings=words, mask=mask))
            (gradient,) = torch.autograd.grad(numbers.sum(), words)
        return numbers.detach(), gradient

    @property
    def tokens(self) -> Tensor:
        """The ids (V,) of the vocabulary."""
        return torch.arange(self.vocabulary, device=self.device)

    def nearest_tokens(
        self,
        misfit: Callable[[Tensor], Tensor],
        count: int,
        batch_size: int = TOKENS_PER_PASS,
    ) -> Tensor:
        """Return the `count` tokens (…, count) of the vocabulary with the least misfit, in order.

        `misfit` maps c tokens to their misfits (…, c). It is called on `batch_size`
        tokens at once.
        """
        least: list[Tensor] = []
        nearest: list[Tensor] = []
        for tokens in self.tokens.split(batch_size):
            misfits = misfit(tokens)
            whole = torch.cat([*least, misfits], -1)
            every = torch.cat([*nearest, tokens.expand(misfits.shape)], -1)
            best = whole.topk(min(count, whole.shape[-1]), largest=False)
            least = [best.values]
            nearest = [every.gather(-1, best.indices)]
        return nearest[0]

    def remembered(
        self,
        what: str,
        key: Any,
        make: Callable[[], Made],
    ) -> Made:
        """Return what `make` gives for this model and `key`, from a cache if it was the last key.

        For every `what` the latest value alone is kept, as long as the model lives.
        """
        kept = _REMEMBERED.setdefault(self.parts.base, {})
        key = (key, self.parts.device)
        if what not in kept or kept[what][0] != key:
            kept.pop(what, None)  # of a large model two values may not fit into memory
            kept[what] = (key, make())
        return kept[what][1]

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, list(ids))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return each token as it is written in the text."""
        return tuple(written(self.tokenizer, list(ids)))


@dataclass(frozen=True)
class Proposal:
    """The ids that an attack proposes, and what they cost; TextRecovery explains the counts.

    `excluded` says why no text of this model explains the leak, if the attack has shown
    that.
    """

    ids: list[int]
    passes: int = 0
    forwards: int = 0
    fitting: int = 0
    note: str = ""
    tested: int = 0
    excluded: str = ""


Proposals = Iterator[tuple[int, Proposal]]  # the number of each leak, with a proposal


class Attack(Protocol):
    """An attack yields the number of each leak with a proposal, in any order.

    The `leaks` hold no trailing padding. An attack that cannot do what it is asked
    raises `Unsuccessful(Status…, reason)`.
    """

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals: ...


@contextmanager
def solvable(model: nn.Module) -> Generator[None]:
    """Turn a failed decomposition into `Unsuccessful`, with the reason in the model's weights.

    torch raises where weights overflow or hold NaN. That makes the attack impossible
    for this model, and says nothing about the exposure.
    """
    try:
        yield
    except LinAlgError as error:
        name = not_finite(model)
        reason = f"the model's weights hold NaN or infinity, in {name}: nothing can be solved for"
        if name is None:
            words = " ".join(str(error).split())[:200]
            reason = (
                f"the equations of this attack have no solution for this model: {words}"
            )
        raise Unsuccessful(Status.NOT_APPLICABLE, reason) from error
