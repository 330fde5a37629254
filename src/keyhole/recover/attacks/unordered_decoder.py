"""Text from a causal decoder's hidden states in random order, left to right.

Position t depends on tokens ≤ t only (decoder.py), so behind the true prefix one token and one row
belong together: the token reproduces the row exactly, and all other pairs do not. What a row says
about its token needs no position (search/ordering.py). So at each position the likeliest tokens of
all rows that are left are run as one fan behind the prefix, and each answer is compared with each
of those rows. The pair that fits extends the prefix and takes its row out; where none does, the fan
is widened. A text of n tokens costs about n²/2 tokens through the model where first guesses are
right.
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
from keyhole.recover.attacks.decoder import Text
from keyhole.recover.leaks import Leak
from keyhole.recover.search.ordering import Orderings, fit
from keyhole.recover.search.row_length import whole_rows


@dataclass(frozen=True)
class UnorderedPrefixes:
    """Left-to-right search for the token and its row.

    `fans`: how many of each row's likeliest tokens are tried, in turn, until one fits. `widest`:
    tokens in one pass. `samples`: random tokens for the ordering (None: eight for each number in a
    row).
    """

    fans: tuple[int, ...] = (1, 4, 16, 64, 256)
    widest: int = 512
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.fans or min(self.fans) < 1 or self.widest < 1:
            raise InputError(f"expected positive fans, got {self.fans} of at most {self.widest}")

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        leaks = whole_rows(target, leaks)
        texts = [Text.of(target, leak, number) for number, leak in enumerate(leaks)]
        error = torch.tensor([text.tolerance.error for text in texts]).median()
        samples = self.samples or 8 * max(texts[0].rows.shape[-1], 128)
        orders = fit(target, leaks[0].exposure, samples, self.seed, float(error))
        fitting = orders.spent
        for text in texts:
            target.count.begin([text.number])
            self._read(target, leaks[0].exposure, orders, text)
            yield text.number, text.proposal(target, fitting)
            fitting = 0  # spent once for all texts

    @torch.no_grad()
    def _read(self, target: Target, exposure: Exposure, orders: Orderings, text: Text) -> None:
        device = text.rows.device
        branches = Branches(target.model, torch.zeros(1, dtype=torch.long, device=device))
        left = text.rows.isfinite().all(-1).nonzero().flatten()
        # Where the search ends early, the rest is proposed in the order in which it leaked.
        likeliest = orders.rest.likelihood(text.rows).argmax(-1)
        while len(left):
            pair = self._pair(branches, exposure, orders, text, left)
            if pair is None:
                text.given_up, text.unexplained = True, len(text.rows) - text.position
                break
            token, row = pair
            text.settle([token])
            left = left[left != row]
            target.count.set(text.number, text.position)
        gaps = (~text.rows.isfinite().all(-1)).nonzero().flatten()
        text.guesses = torch.cat([likeliest[:0].new_zeros(text.position), likeliest[left],
                                  likeliest[gaps]])[: len(text.rows)]  # fmt: skip

    def _pair(
        self, branches: Branches, exposure: Exposure, orders: Orderings, text: Text, left: Tensor
    ) -> tuple[int, int] | None:
        """The next token and the row that it reproduces; the prefix is extended by it."""
        device, at = text.rows.device, text.position
        ordering = orders.rest if at else orders.opening
        scores, spread = ordering.likelihood(text.rows[left]), orders.spread(at)
        limit, tried = text.tolerance.limit(text.rows.shape[-1]), torch.zeros(0, device=device)
        for count in self.fans:
            wanted = scores.topk(min(count, scores.shape[1])).indices.T.flatten().unique()
            fresh = wanted[~torch.isin(wanted, tried)]
            tried = torch.cat([tried, fresh])
            for fan in fresh.split(self.widest):
                side = torch.zeros(1, dtype=torch.bool, device=device)
                given = branches.expose(exposure, side, ids=fan[None])["values"][0]
                text.passes, text.tested = text.passes + 1, text.tested + len(fan)
                misfits = torch.stack([
                    text.tolerance.misfit(row, given - text.rows[row], spread)
                    for row in left.tolist()
                ])  # fmt: skip
                best = int(misfits.argmin())
                row, token = divmod(best, len(fan))
                fits = bool(misfits[row, token] <= limit)
                first, accepted, text_ = torch.tensor([[token], [fits], [0]], device=device)
                branches.accept(first, accepted, text_)
                if fits:
                    return int(fan[token]), int(left[row])
        return None
