"""A reader: a small Transformer that writes the text it believes a vector comes from (ours).

It is given the vector e, and where there is one a guess with the guess's own vector e′; it writes
the text token by token, so it also says where the text ends. What it learns is to read the
difference e − e′ as the tokens that are missing, which is what the corrector of vec2text (Morris et
al., 2023) does; unlike it, this one is small, shares the encoder's token embeddings, is learnt in
minutes from a corpus that the attacker has (learn.py), and only proposes: a text counts when the
encoder gives the vector back (search.py, judge.py).

The weights of the encoder are known, so the reader also sees what the encoder made of the guess: in
each place i the last layer's state hᵢ and n·(e − e′). The mean of n states would be right if this
state alone were hᵢ + n·(e − e′), up to their scale: that points at the token that belongs there.

The sequence is [e, e′, e − e′ | guess | text]: the first two parts see each other whole, the text
sees them and what was written before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from keyhole.recover.embedding.luck import gumbel
from keyhole.recover.embedding.scoring import Encoder, Texts

_SLOTS = 4  # positions that each of the three vectors is spread over
_NEAR = 4.0  # the factor on e − e′, which is small where it matters most
_MORE = 4  # tokens by which a text may be longer than the longest guess
_AT_ONCE = 2048  # texts whose likelihood is taken together: V numbers for each of their tokens
Memory = tuple[Tensor, Tensor]


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

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self._after(x, *self._heads(x), mask)

    def write(self, x: Tensor, mask: Tensor, memory: Memory, place: int) -> Tensor:
        """The same for positions from `place` on, with the keys and values of those before."""
        q, k, v = self._heads(x)
        keys, values = memory
        end = place + x.shape[1]
        keys[:, :, place:end], values[:, :, place:end] = k, v
        return self._after(x, q, keys[:, :, :end], values[:, :, :end], mask)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        parts = self.inputs(self.before(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        return q, k, v

    def _after(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Reader(nn.Module):
    """Writes texts for an encoder's vectors; its token embeddings are shared and left alone."""

    def __init__(self, encoder: Encoder, vector: int, size: Size | None = None) -> None:
        super().__init__()
        self.size = size = size or Size()
        self.encoder = encoder
        self.end = encoder.after[0] if encoder.after else encoder.pad
        self.table: Tensor
        table = encoder.table.detach().float()
        self.register_buffer("table", table / table.std(), False)
        width, embedding = size.width, table.shape[1]
        self.token = nn.Linear(embedding, width)
        self.vector = nn.Linear(3 * vector, 3 * _SLOTS * width)
        self.seen = nn.Linear(encoder.target.parts.width + vector, width)
        self.bag = nn.Linear(3 * vector, embedding)  # which tokens, wherever they stand
        self.begin = nn.Parameter(torch.zeros(width))
        self.places = nn.Parameter(0.02 * torch.randn(3 * _SLOTS + 2 * size.longest + 1, width))
        blocks = [_Block(width, size.heads) for _ in range(size.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.LayerNorm(width)
        self.out = nn.Linear(width, embedding)
        self.bias = nn.Parameter(torch.zeros(len(table)))
        nn.init.zeros_(self.bag.weight)
        for block in blocks:
            for layer in (block.output, block.narrow):
                nn.init.normal_(layer.weight, std=0.02 / (2 * size.layers) ** 0.5)

    def _given(self, goals: Tensor, guess: Texts) -> tuple[Tensor, Tensor, Tensor]:
        """The part that is given (b, g, w), which of it counts (b, g), and the bag (b, 1, e)."""
        scale, n = goals.shape[-1] ** 0.5, guess.ids.shape[1]
        vectors, off, tokens = torch.zeros_like(goals), torch.zeros_like(goals), []
        if n:
            some = (guess.lengths > 0)[:, None]
            # A model that frames nothing has no answer to no tokens: it is asked about one instead.
            vectors, states = self.encoder.look(Texts(guess.ids, guess.lengths.clamp(min=1)))
            vectors = vectors.where(some, 0.0)
            off = (goals - vectors).where(some, 0.0)
            missing = (scale * guess.lengths[:, None] * off)[:, None].expand(-1, n, -1)
            seen = torch.cat([layer_norm(states.float(), states.shape[-1:]), missing], -1)
            tokens = [self.token(self.table[guess.ids]) + self.seen(seen)]
        three = scale * torch.cat([goals, vectors, _NEAR * off], -1)
        slots = self.vector(three).view(len(goals), 3 * _SLOTS, -1)
        given = torch.cat([slots, *tokens], 1)
        given = given + self.places[: given.shape[1]]
        counts = torch.cat([guess.mask.new_ones(len(goals), 3 * _SLOTS), guess.mask], 1)
        return given, counts, self.bag(three)[:, None]

    def _written(self, tokens: Tensor, first: int = 0) -> Tensor:
        """What stands for tokens (b, n) of the text, of which the first has that place."""
        start = 3 * _SLOTS + self.size.longest + 1 + first
        return self.token(self.table[tokens]) + self.places[start : start + tokens.shape[1]]

    def _begin(self, count: int) -> Tensor:
        return (self.begin + self.places[3 * _SLOTS + self.size.longest]).expand(count, 1, -1)

    def _scores(self, x: Tensor, bag: Tensor) -> Tensor:
        wanted = (self.out(self.last(x)) + bag) / self.table.shape[1] ** 0.5
        return wanted @ self.table.T.to(wanted.dtype) + self.bias.to(wanted.dtype)

    def _read(
        self, goals: Tensor, guess: Texts, texts: Texts, blocks: Iterable[Any]
    ) -> tuple[Tensor, Tensor]:
        """What it makes of each token of the texts and of their ends (b, n + 1, w), and the bag."""
        given, counts, bag = self._given(goals, guess)
        (b, g), n = counts.shape, texts.ids.shape[1]
        x = torch.cat([given, self._begin(b), self._written(texts.ids)], 1)
        mask = torch.zeros(b, g + n + 1, g + n + 1, dtype=torch.bool, device=x.device)
        mask[:, :, :g] = counts[:, None]
        mask[:, g:, g:] = torch.ones(n + 1, n + 1, dtype=torch.bool, device=x.device).tril()
        hidden = torch.zeros(mask.shape, dtype=_dtype(x), device=x.device)
        hidden.masked_fill_(~mask, -torch.inf)
        for block in blocks:
            x = block(x, hidden[:, None])
        return x[:, g:], bag.expand(b, n + 1, -1)

    def _right(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """What is to be written after each token (b, n + 1), and up to where that counts."""
        right = torch.cat([texts.ids, texts.ids.new_zeros(len(texts), 1)], 1)
        right.scatter_(1, texts.lengths[:, None], self.end)
        places = torch.arange(right.shape[1], device=right.device)
        return right, places <= texts.lengths[:, None]

    def loss(
        self, goals: Tensor, guess: Texts, texts: Texts, blocks: Iterable[Any] | None = None
    ) -> Tensor:
        """The mean −log p of each token of the texts and of their ends; `blocks` compiled, say."""
        x, bags = self._read(goals, guess, texts, self.blocks if blocks is None else blocks)
        right, counted = self._right(texts)
        return cross_entropy(self._scores(x[counted], bags[counted]).float(), right[counted])

    @torch.no_grad()
    def log_likelihood(self, goals: Tensor, texts: Texts) -> Tensor:
        """log p (b,) of whole texts, given their goals and no guess."""
        parts = [self._log_likelihood(goals[rows], texts[rows]) for rows in _parts(goals, _AT_ONCE)]
        return torch.cat(parts)

    def _log_likelihood(self, goals: Tensor, texts: Texts) -> Tensor:
        texts = texts.padded(int(texts.lengths.max()))
        x, bags = self._read(goals, _nothing(goals), texts, self.blocks)
        right, counted = self._right(texts)
        losses = x.new_zeros(right.shape, dtype=torch.float32)
        scores = self._scores(x[counted], bags[counted]).float()
        losses[counted] = cross_entropy(scores, right[counted], reduction="none")
        return -losses.sum(-1)

    @torch.no_grad()
    def tokens(self, goals: Tensor, texts: Texts, count: int, generator: torch.Generator) -> Tensor:
        """Tokens (b, n, count) that it might rather see at each place, drawn without repetition.

        Each would follow the text's own beginning, with the text itself as the guess.
        """
        x, bags = self._read(goals, texts, texts, self.blocks)
        scores = self._scores(x[:, :-1], bags[:, :-1]).float()
        scores[..., self.end] = -torch.inf
        return (scores + gumbel(scores, generator)).topk(count, dim=-1).indices

    @torch.no_grad()
    def write(
        self, goals: Tensor, guess: Texts | None, heat: Tensor, generator: torch.Generator,
        kept: Tensor | None = None,
    ) -> Texts:  # fmt: skip
        """One text for each row, drawn with temperature `heat` (b,); 0 takes the best token.

        It is at most four tokens longer than the longest guess, where there are guesses, of which
        the first `kept` (b,) tokens stay.
        """
        if guess is None:
            guess = _nothing(goals)
        given, counts, bag = self._given(goals, guess)
        (b, g), n = counts.shape, self.size.longest
        if guess.ids.shape[1] and bool((guess.lengths > 0).all()):
            n = min(n, int(guess.lengths.max()) + _MORE)
        memory = self._memory(given, n)
        self._through(given, counts[:, None, None], memory, 0)
        ids = guess.lengths.new_zeros(b, self.size.longest)
        lengths = guess.lengths.new_full((b,), n)
        ended = torch.zeros(b, dtype=torch.bool, device=given.device)
        seen = torch.cat([counts, counts.new_ones(b, n + 1)], 1)
        x = self._begin(b)
        for place in range(n):
            x = self._through(x, seen[:, None, None, : g + place + 1], memory, g + place)
            scores = self._scores(x[:, 0], bag[:, 0]).float()
            if not place:
                scores[:, self.end] = -torch.inf  # a text has a token
            token = _drawn(scores, heat, generator)
            if kept is not None and place < guess.ids.shape[1]:
                token = torch.where(place < kept, guess.ids[:, place], token)
            now = (token == self.end) & ~ended
            lengths = torch.where(now, place, lengths)
            ended |= now
            ids[:, place] = token
            if place % 8 == 7 and bool(ended.all()):  # asking waits for the GPU
                break
            x = self._written(token[:, None], place)
        return Texts(ids, lengths).clean()

    def _through(self, x: Tensor, mask: Tensor, memory: list[Memory], place: int) -> Tensor:
        for block, past in zip(cast("Iterable[_Block]", self.blocks), memory, strict=True):
            x = block.write(x, mask, past, place)
        return x

    def _memory(self, given: Tensor, n: int) -> list[Memory]:
        """Room for the keys and values of what is given and of n tokens, for each block."""
        dtype = _dtype(given)
        head = self.size.width // self.size.heads
        room = (len(given), self.size.heads, given.shape[1] + n + 1, head)
        return [
            (given.new_zeros(room, dtype=dtype), given.new_zeros(room, dtype=dtype))
            for _ in self.blocks
        ]


def _nothing(goals: Tensor) -> Texts:
    """No guess."""
    ids = torch.zeros(len(goals), 0, dtype=torch.long, device=goals.device)
    return Texts(ids, torch.zeros(len(goals), dtype=torch.long, device=goals.device))


def _parts(rows: Tensor, at_once: int) -> Iterable[Tensor]:
    return torch.arange(len(rows), device=rows.device).split(at_once)


def _dtype(x: Tensor) -> torch.dtype:
    """What matrices are multiplied in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _drawn(scores: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row (b, V): the largest of the scores with Gumbel noise times the heat."""
    return (scores + heat[:, None] * gumbel(scores, generator)).argmax(-1)
