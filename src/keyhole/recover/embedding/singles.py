"""Single changes of texts (a token replaced, put in or left out), and texts with several of them.

All changes of p texts stand in one table (p, N), the same kinds and places for every text, so that
what each does to the vector is one tensor (p, N, d) that can be added up (sums.py). Two changes go
together if they are in different slots: a token is replaced or left out once, and one token is put
into a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.embedding.scoring import Texts

REPLACED, PUT_IN, LEFT_OUT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Singles:
    """N single changes of each of p texts."""

    parents: Texts
    tokens: Tensor  # (p, N) that are put in, or in the place of another
    allowed: Tensor  # (p, N)
    kinds: Tensor  # (N,)
    places: Tensor  # (N,) a token's place, or the gap before it
    longest: int

    @classmethod
    def of(cls, parents: Texts, replaced: Tensor, put_in: Tensor, longest: int) -> Singles:
        """From tokens (p, n, m) for every place, and (p, n + 1, m′) for every gap."""
        (n, m), gaps = replaced.shape[1:], put_in.shape[2]
        device = replaced.device
        places, between = (torch.arange(k, device=device) for k in (n, n + 1))
        inside = places < parents.lengths[:, None]
        fits = (between <= parents.lengths[:, None]) & (parents.lengths < longest)[:, None]
        new = replaced != parents.ids[:, :n, None]
        return cls(
            parents,
            torch.cat([replaced.flatten(1), put_in.flatten(1), parents.ids[:, :n]], 1),
            torch.cat(
                [
                    (inside[..., None] & new).flatten(1),
                    fits.repeat_interleave(gaps, 1),
                    inside & (parents.lengths > 1)[:, None],
                ],
                1,
            ),
            torch.tensor([REPLACED] * (n * m) + [PUT_IN] * ((n + 1) * gaps) + [LEFT_OUT] * n).to(
                device
            ),
            torch.cat([places.repeat_interleave(m), between.repeat_interleave(gaps), places]),
            longest,
        )

    @property
    def width(self) -> int:
        """Places of the longest of these texts."""
        return int(self.places.max())

    @property
    def slots(self) -> Tensor:
        """(N,) the slot that each change takes, below 2·width + 1."""
        return self.places + self.width * (self.kinds == PUT_IN)

    def applied(self, rows: Tensor, sets: Tensor) -> tuple[Texts, Tensor]:
        """Text `rows[b]` with the changes `sets[b]` (b, k), -1 for none; and which have room."""
        n, here = self.width, torch.arange(len(rows), device=rows.device)
        parents = self.parents[rows]
        tokens = parents.ids[:, :n].where(parents.mask[:, :n], -1)
        gaps = torch.full((len(rows), n + 1), -1, device=rows.device)
        for column in sets.unbind(1):
            change = column.clamp(min=0)
            kind = self.kinds[change].where(column >= 0, -1)
            place, token = self.places[change], self.tokens[rows, change]
            for changed, wanted, value in (
                (tokens, REPLACED, token), (tokens, LEFT_OUT, token.new_full((), -1)),
                (gaps, PUT_IN, token),
            ):  # fmt: skip
                hit = kind == wanted
                changed[here[hit], place[hit]] = value.expand(token.shape)[hit]
        both = torch.full((len(rows), 2 * n + 1), -1, device=rows.device)
        both[:, 0::2], both[:, 1::2] = gaps, tokens
        order = (both < 0).long().argsort(dim=1, stable=True)
        lengths = (both >= 0).sum(1)
        texts = Texts(both.gather(1, order).clamp(min=0), lengths).padded(self.longest)
        return texts.clean(), (lengths > 0) & (lengths <= self.longest)
