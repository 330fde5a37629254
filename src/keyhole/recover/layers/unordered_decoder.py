"""Text from hidden states of a causal decoder in random order.

Position t depends on tokens ≤ t only (decoder.py), so after the true prefix exactly one token and
one row belong together: the token reproduces the row, and no other pair does. What a row says about
its token needs no position (ordering.py). So at each position the likeliest tokens of all remaining
rows are run side by side after the prefix, and each answer is compared with each of those rows. The
pair that fits extends the prefix, and its row is taken out; where none fits, more tokens are tried.
A text of n tokens costs about n²/2 tokens through the model where first guesses are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.decoder import Text, begun
from keyhole.recover.layers.ordering import Orderings
from keyhole.recover.layers.row_length import whole_rows
from keyhole.recover.leaks import Leak


@dataclass(frozen=True)
class UnorderedPrefixes:
    """Left-to-right search for the token and its row.

    `fans`: how many of each row's likeliest tokens are tried, fewer first, until one fits; in the
    end the whole vocabulary is.
    `widest`: tokens in one pass. `samples`: random tokens to fit the ordering with (None: eight for
    each number in a row).
    """

    fans: tuple[int, ...] = (1, 4, 16, 64, 256)
    widest: int = 512
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.fans or min(self.fans) < 1 or self.widest < 1:
            raise InputError(f"fans and widest must be positive: got {self.fans} and {self.widest}")

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        leaks = whole_rows(target, leaks)
        texts, orderings = begun(target, leaks, self.samples, self.seed)
        fitting = orderings.spent
        for text in texts:
            target.count.begin([text.number])
            self._read(target, leaks[0].exposure, orderings, text)
            yield text.number, text.proposal(target, fitting)
            fitting = 0  # spent once for all texts

    @torch.no_grad()
    def _read(self, target: Target, exposure: Exposure, orderings: Orderings, text: Text) -> None:
        """Extend the text by one token and its row at a time, until no row is left or none fits."""
        device = text.rows.device
        branches = Branches(target.model, torch.zeros(1, dtype=torch.long, device=device))
        leaked = text.rows.isfinite().all(-1)
        remaining = leaked.nonzero().flatten()
        # Where the search ends early, the rest is proposed in the order in which it leaked.
        likeliest = orderings.rest.likelihood(text.rows).argmax(-1)
        while len(remaining):
            pair = self._pair(branches, exposure, orderings, text, remaining)
            if pair is None:
                text.given_up, text.unexplained = True, len(text.rows) - text.position
                text.excluded = text.position
                break
            token, row = pair
            text.settle([token], [0.0])
            remaining = remaining[remaining != row]
            target.count.set(text.number, text.position)
        gaps = (~leaked).nonzero().flatten()
        found = likeliest.new_zeros(text.position)  # not guessed
        guesses = torch.cat([found, likeliest[remaining], likeliest[gaps]])
        text.guesses = guesses[: len(text.rows)]

    def _pair(
        self, branches: Branches, exposure: Exposure, orderings: Orderings, text: Text,
        remaining: Tensor,
    ) -> tuple[int, int] | None:  # fmt: skip
        """The next token and the row that it reproduces; `branches` is extended by it."""
        device, position = text.rows.device, text.position
        ordering = orderings.at(position)
        scores, spread = ordering.likelihood(text.rows[remaining]), orderings.spread(position)
        limit = text.tolerance.limit(text.rows.shape[-1])
        tried = torch.zeros(0, device=device)
        no_chain = torch.zeros(1, dtype=torch.bool, device=device)  # tokens are alternatives
        for count in (*self.fans, scores.shape[1]):
            wanted = scores.topk(min(count, scores.shape[1])).indices.T.flatten().unique()
            fresh = wanted[~torch.isin(wanted, tried)]
            tried = torch.cat([tried, fresh])
            for tokens in fresh.split(self.widest) if len(fresh) else ():
                given = branches.expose(exposure, no_chain, ids=tokens[None])["values"][0]
                text.passes, text.tested = text.passes + 1, text.tested + len(tokens)
                misfits = torch.stack([
                    text.tolerance.misfit(row, given - text.rows[row], spread)
                    for row in remaining.tolist()
                ])  # fmt: skip
                row, token = divmod(int(misfits.argmin()), len(tokens))
                fits = bool(misfits[row, token] <= limit)
                node, count, the_text = torch.tensor([[token], [fits], [0]], device=device)
                branches.accept(first=node, counts=count, rows=the_text)  # none unless it fits
                if fits:
                    return int(tokens[token]), int(remaining[row])
        return None
