"""A reader: a small Transformer that writes the text it believes a vector comes from (ours).

It is given the vector e, and where there is one a guess with the guess's own vector e′; it writes
the text token by token, so it also says where the text ends. What it learns is to read the
difference e − e′ as the tokens that are missing, which is what the corrector of vec2text (Morris et
al., 2023) does; unlike it, this one is small, shares the encoder's token embeddings, is learnt in
minutes from a corpus that the attacker has (learn.py), and only proposes: a text counts when the
encoder gives the vector back (search.py, judge.py).

The sequence is [e, e′, e − e′ | guess | text]: the first two parts see each other whole, the text
sees them and what was written before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from keyhole.recover.embedding.scoring import Texts

_SLOTS = 4  # positions that each of the three vectors is spread over
_NEAR = 4.0  # the factor on e − e′, which is small where it matters most


@dataclass(frozen=True)
class Size:
    """How large a reader is."""

    width: int = 512
    layers: int = 6
    heads: int = 8
    longest: int = 34  # tokens of a text


class _Block(nn.Module):
    """Attention and a two-layer network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        b, n, w = x.shape
        parts = self.inputs(self.before(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if memory is not None:
            keys, values, place = memory
            keys[:, :, place : place + n], values[:, :, place : place + n] = k, v
            k, v = keys[:, :, : place + n], values[:, :, : place + n]
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.output(mixed.transpose(1, 2).reshape(b, n, w))
        x = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return x, (k, v)


class Reader(nn.Module):
    """Writes texts for vectors; `table` (V, e) are the encoder's token embeddings, not learnt."""

    def __init__(self, table: Tensor, vector: int, end: int, size: Size | None = None) -> None:
        super().__init__()
        self.size = size = size or Size()
        self.end = end
        self.table: Tensor
        self.register_buffer("table", table.detach().float() / table.float().std(), False)
        width = size.width
        self.token = nn.Linear(table.shape[1], width)
        self.vector = nn.Linear(3 * vector, 3 * _SLOTS * width)
        self.bag = nn.Linear(3 * vector, table.shape[1])  # which tokens, wherever they stand
        self.begin = nn.Parameter(torch.zeros(width))
        self.places = nn.Parameter(0.02 * torch.randn(3 * _SLOTS + 2 * size.longest + 1, width))
        blocks = [_Block(width, size.heads) for _ in range(size.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.LayerNorm(width)
        self.out = nn.Linear(width, table.shape[1])
        self.bias = nn.Parameter(torch.zeros(len(table)))
        nn.init.zeros_(self.bag.weight)
        for block in blocks:
            for layer in (block.output, block.narrow):
                nn.init.normal_(layer.weight, std=0.02 / (2 * size.layers) ** 0.5)

    def _given(self, goals: Tensor, guess: Texts, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part that is given (b, g, w), which of it counts (b, g), and the bag (b, 1, e)."""
        some = (guess.lengths > 0)[:, None]
        off = torch.where(some, _NEAR * (goals - vectors), 0.0)
        both = torch.cat([goals, torch.where(some, vectors, 0.0), off], -1)
        both = goals.shape[-1] ** 0.5 * both
        slots = self.vector(both).view(len(goals), 3 * _SLOTS, -1)
        tokens = self.token(self.table[guess.ids])
        given = torch.cat([slots, tokens], 1)
        given = given + self.places[: given.shape[1]]
        counts = torch.cat([guess.mask.new_ones(len(goals), 3 * _SLOTS), guess.mask], 1)
        return given, counts, self.bag(both)[:, None]

    def _written(self, tokens: Tensor, first: int = 0) -> Tensor:
        """What stands for tokens (b, n) of the text, of which the first has that place."""
        start = 3 * _SLOTS + self.size.longest + 1 + first
        return self.token(self.table[tokens]) + self.places[start : start + tokens.shape[1]]

    def _begin(self, count: int) -> Tensor:
        return (self.begin + self.places[3 * _SLOTS + self.size.longest]).expand(count, 1, -1)

    def _scores(self, x: Tensor, bag: Tensor) -> Tensor:
        found = (self.out(self.last(x)) + bag) / self.table.shape[1] ** 0.5
        return found @ self.table.T.to(found.dtype) + self.bias.to(found.dtype)

    def _read(
        self, goals: Tensor, guess: Texts, vectors: Tensor, texts: Texts
    ) -> tuple[Tensor, Tensor]:
        """What it makes of each token of the texts and of their ends (b, n + 1, w), and the bag."""
        given, counts, bag = self._given(goals, guess, vectors)
        (b, g), n = counts.shape, texts.ids.shape[1]
        x = torch.cat([given, self._begin(b), self._written(texts.ids)], 1)
        mask = torch.zeros(b, g + n + 1, g + n + 1, dtype=torch.bool, device=x.device)
        mask[:, :, :g] = counts[:, None]
        mask[:, g:, g:] = torch.ones(n + 1, n + 1, dtype=torch.bool, device=x.device).tril()
        hidden = torch.zeros(mask.shape, dtype=_dtype(x), device=x.device)
        hidden.masked_fill_(~mask, -torch.inf)
        for block in self.blocks:
            x, _ = block(x, hidden[:, None])
        return x[:, g:], bag.expand(b, n + 1, -1)

    def loss(self, goals: Tensor, guess: Texts, vectors: Tensor, texts: Texts) -> Tensor:
        """The mean −log p of each token of the texts and of their ends."""
        x, bags = self._read(goals, guess, vectors, texts)
        b, n = texts.ids.shape
        right = torch.cat([texts.ids, texts.ids.new_zeros(b, 1)], 1)
        right.scatter_(1, texts.lengths[:, None], self.end)
        counted = torch.arange(n + 1, device=x.device) <= texts.lengths[:, None]
        return cross_entropy(self._scores(x[counted], bags[counted]).float(), right[counted])

    @torch.no_grad()
    def tokens(self, goals: Tensor, texts: Texts, vectors: Tensor, count: int) -> Tensor:
        """The tokens (b, n, count) it would rather see at each place of a text, the best first.

        Each is what follows the text's own beginning, with the text itself as the guess.
        """
        x, bags = self._read(goals, texts, vectors, texts)
        scores = self._scores(x[:, :-1], bags[:, :-1])
        scores[..., self.end] = -torch.inf
        return scores.topk(count, dim=-1).indices

    @torch.no_grad()
    def write(
        self, goals: Tensor, guess: Texts, vectors: Tensor, heat: Tensor, generator: torch.Generator
    ) -> Texts:
        """One text for each row, drawn with temperature `heat` (b,); 0 takes the best token.

        It is at most four tokens longer than the longest guess, where there are guesses.
        """
        given, counts, bag = self._given(goals, guess, vectors)
        (b, g), n = counts.shape, self.size.longest
        if bool((guess.lengths > 0).all()):
            n = min(n, int(guess.lengths.max()) + 4)
        memory = self._memory(given, n)
        x = given
        for block, (keys, values) in zip(self.blocks, memory, strict=True):
            x, _ = block(x, counts[:, None, None], (keys, values, 0))
        ids = guess.ids.new_zeros(b, self.size.longest)
        lengths = guess.lengths.new_full((b,), n)
        ended = torch.zeros(b, dtype=torch.bool, device=given.device)
        seen = torch.cat([counts, counts.new_ones(b, n + 1)], 1)
        x = self._begin(b)
        for place in range(n):
            for block, (keys, values) in zip(self.blocks, memory, strict=True):
                x, _ = block(x, seen[:, None, None, : g + place + 1], (keys, values, g + place))
            token = _drawn(self._scores(x[:, 0], bag[:, 0]).float(), heat, generator)
            now = (token == self.end) & ~ended
            lengths = torch.where(now, place, lengths)
            ended |= now
            ids[:, place] = token
            if place % 8 == 7 and bool(ended.all()):  # asking waits for the GPU
                break
            x = self._written(token[:, None], place)
        return Texts(ids, lengths.clamp(min=1)).clean()

    def _memory(self, given: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of what is given and of n tokens, for each block."""
        dtype = _dtype(given)
        head = self.size.width // self.size.heads
        room = (len(given), self.size.heads, given.shape[1] + n + 1, head)
        return [
            (given.new_zeros(room, dtype=dtype), given.new_zeros(room, dtype=dtype))
            for _ in self.blocks
        ]


def _dtype(x: Tensor) -> torch.dtype:
    """What matrices are multiplied in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _drawn(scores: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row (b, V): the largest of the scores with Gumbel noise times the heat."""
    noise = torch.rand(scores.shape, generator=generator, device=scores.device)
    noise = -(-noise.clamp(1e-9, 1 - 1e-7).log()).log()
    return (scores + heat[:, None] * noise).argmax(-1)
