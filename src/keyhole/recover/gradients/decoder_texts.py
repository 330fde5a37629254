"""The texts of a causal model's batch, left to right (DAGER, arXiv 2405.15586).

What the second attention receives at position t depends only on the tokens up to t, so a prefix
lies in the span of its gradient exactly if some text of the batch begins with it. All prefixes are
extended side by side by all tokens of the batch. The prefix's keys and values are kept
(models/branches.py), so that trying a token costs a token's pass through one block. A prefix that
no token extends is a text.

A model with rotary positions gives the same row for a token repeated as for the token alone,
because attention over equal values is that value. Such a token proves nothing: it stays only if
something else follows after a few repetitions at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch import Tensor

from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.gradients.span import Span, second_inputs

_SAME = 1e-4  # of a row's length: rows nearer than this count as equal
_MORE = 2  # times the texts of a batch: prefixes that are extended
_REPEATED = 4  # times that a text's first token may follow itself
_OUT = 6.0  # median deviations from the median of a distance that stands out


@dataclass(frozen=True, eq=False)
class _Prefix:
    """Ids, how many of the first ones are proven by a row of their own, and the last row."""

    ids: tuple[int, ...]
    proven: int
    row: Tensor | None


@dataclass(eq=False)
class DecoderTexts:
    """The search for the texts of a batch, of the `tokens` that may stand at each position.

    A single entry of `tokens` is for all positions. Where errors or a low rank blur the span, the
    next tokens are those `standing_out` from the others by their distance.
    """

    target: Target
    span: Span
    tokens: Sequence[Tensor]
    texts: int
    max_length: int
    standing_out: bool = False

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[int]]:
        device = self.target.parts.device
        branches = Branches(self.target.model, torch.zeros(1, dtype=torch.long, device=device))
        active = [_Prefix((), 0, None)]
        ended: list[_Prefix] = []
        # A model without embeddings of positions has the same tokens everywhere.
        everywhere = len(self.tokens) == 1
        tokens = repeat(self.tokens[0]) if everywhere else self.tokens
        for some in islice(tokens, self.max_length):
            longer = self._longer(branches, active, some)
            going = {parent for parent, _, _ in longer}
            ended += [prefix for number, prefix in enumerate(active) if number not in going]
            active = [prefix for _, _, prefix in longer]
            if not longer:
                break
            parents = torch.tensor([parent for parent, _, _ in longer], device=device)
            first = torch.tensor([node for _, node, _ in longer], device=device)
            branches.accept(first, torch.ones_like(first), parents)
        yield from _distinct([*ended, *active])

    def _longer(
        self, branches: Branches, active: Sequence[_Prefix], tokens: Tensor
    ) -> list[tuple[int, int, _Prefix]]:
        """Return (prefix, node, longer prefix) of those in the span, the nearest first."""
        chain = torch.zeros(len(active), dtype=torch.bool, device=tokens.device)
        ids = tokens.expand(len(active), -1)
        states = branches.expose(Exposure("hidden", 1), chain, ids=ids)["values"]
        rows = second_inputs(self.target.parts, states)  # (b, c, d)
        far = self.span.distance(rows)
        most = self.span.tolerance
        if self.standing_out:
            middle = far.median()
            most = float(middle - _OUT * (far - middle).abs().median())
        inside = (far <= most).nonzero()
        near: list[list[int]] = inside[far[inside[:, 0], inside[:, 1]].argsort()].tolist()
        longer: list[tuple[int, int, _Prefix]] = []
        for parent, node in near[: _MORE * self.texts]:
            prefix, row = active[parent], rows[parent, node]
            ids = (*prefix.ids, int(tokens[node]))
            same = prefix.row is not None and bool((row - prefix.row).norm() <= _SAME * row.norm())
            proven = prefix.proven if same else len(ids)
            if len(ids) - proven > _REPEATED:
                continue
            longer.append((parent, node, _Prefix(ids, proven, row)))
        return longer


def _distinct(ended: Sequence[_Prefix]) -> Iterator[list[int]]:
    """Yield the proven part of each text, the longest first, unless another begins with it."""
    texts = sorted({prefix.ids[: prefix.proven] for prefix in ended}, key=len, reverse=True)
    kept: list[tuple[int, ...]] = []
    for text in texts:
        if text and not any(longer[: len(text)] == text for longer in kept):
            kept.append(text)
            yield list(text)
