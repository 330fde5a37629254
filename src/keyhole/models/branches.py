"""A KV cache from which many continuations branch: a candidate costs one token's forward pass.

To test many tokens after one prefix, the usual way repeats the prefix's cache for each of them.
Here the candidates are one chunk behind the prefix, and the attention mask says what each may see:
the prefix, and in the chunk itself alone (a fan: candidates for one position) or all before it too
(a chain: a guess of the next tokens). So the prefix is stored once, and memory is linear in its
length. Texts of one batch may have prefixes of different lengths, and some a fan while others have
a chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.machine import available
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture

_ROW = 128  # candidates that share one copy of the prefix
_SHARE = 0.25  # of the free memory for one pass
_ACTIVATIONS = 40  # numbers that a pass holds of a token at once, for each of the model's width


class _Layer:
    """One layer's keys and values, (texts, heads, columns, size): the prefix, then the chunk."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], -2)
            values = torch.cat([self.values, values], -2)
        self.keys, self.values = keys, values
        return keys, values

    def keep(self, rows: Tensor, columns: Tensor) -> None:
        if self.keys is None or self.values is None:
            return
        index = columns[:, None, :, None]
        self.keys, self.values = (
            kept[rows].gather(2, index.expand(-1, kept.shape[1], -1, kept.shape[3]))
            for kept in (self.keys, self.values)
        )


class Branches:
    """What the model remembers of each text's prefix; `expose` tries tokens behind it.

    It stands in for the library's cache (`update`, `get_seq_length`, `layers`), nothing more.
    `starts` (b,) counts the positions of padding before each text.
    """

    def __init__(self, model: nn.Module, starts: Tensor) -> None:
        self.model = model
        self.starts = starts
        self.lengths = torch.zeros_like(starts)
        self.layers = [_Layer() for _ in range(anatomy(model).layers)]
        self.positions = starts[:, None]  # of the last chunk's tokens
        self._prefix = 0  # columns before the chunk

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.layers[layer_idx].extend(keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self._prefix

    def expose(self, exposure: Exposure, chain: Tensor, **chunk: Tensor) -> dict[str, Tensor]:
        """The exposure for a chunk of q tokens behind each prefix: `ids=` or `embeddings=`.

        `chain` (b,) says whose chunk is a chain; the others' are fans. `accept` must follow.
        """
        given = next(iter(chunk.values()))
        size, device = given.shape[1], given.device
        square = torch.ones(size, size, dtype=torch.bool, device=device)
        inside = torch.where(chain[:, None, None], square.tril(), square.tril().triu())
        columns = torch.arange(self._prefix, device=device)
        prefix = (columns < self.lengths[:, None])[:, None].expand(-1, size, -1)
        sees = torch.cat([prefix, inside], -1)
        dtype = anatomy(self.model).tokens.weight.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]
        depth = torch.where(chain[:, None], torch.arange(size, device=device), 0)
        # What pads a short chain may lie behind the last position there is; nobody looks at it.
        last = anatomy(self.model).max_length - 1
        self.positions = ((self.starts + self.lengths)[:, None] + depth).clamp(max=last)
        exposed = capture(
            self.model, exposure, **chunk, mask=mask, position_ids=self.positions,
            past_key_values=self,
        )  # fmt: skip
        # A cache holds the prefix as well; only the chunk is asked about.
        return {name: tensor[..., -size:, :] for name, tensor in exposed.items()}

    def each(
        self, exposure: Exposure, row: int, length: int, tokens: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The exposure of many tokens (k,), each by itself behind a text's first `length` ones.

        Tensors have one text of k tokens, and so have the positions (1, k). What was kept stays.
        """
        count = -(-len(tokens) // _ROW)
        size = -(-len(tokens) // count)
        ids = torch.cat([tokens, tokens[-1:].expand(count * size - len(tokens))])
        prefix = self._repeated(row, count, length)
        fans = torch.zeros(count, dtype=torch.bool, device=tokens.device)
        exposed = prefix.expose(exposure, fans, ids=ids.view(count, size))
        flat = {
            name: tensor.movedim(0, -3).flatten(-3, -2)[None, ..., : len(tokens), :]
            for name, tensor in exposed.items()
        }
        return flat, prefix.positions.flatten()[None, : len(tokens)]

    def at_once(self, length: int) -> int:
        """How many tokens behind so long a prefix fit into a pass of `each`, by the free memory."""
        parts = anatomy(self.model)
        cached = 2 * parts.layers * parts.key_heads * parts.head_dim * (1 + length / _ROW)
        scores = 4 * parts.heads * (length + _ROW)
        numbers = cached + scores + _ACTIVATIONS * parts.width
        return _ROW * max(1, int(_SHARE * available(parts.device) / (4 * numbers)) // _ROW)

    def _repeated(self, row: int, count: int, length: int) -> Branches:
        """The beginning of one text's prefix, `count` times: for as many chunks."""
        other = Branches(self.model, self.starts[row].expand(count))
        other.lengths = torch.full_like(other.starts, length)
        other._prefix = length
        for mine, own in zip(self.layers, other.layers, strict=True):
            if mine.keys is not None and mine.values is not None:
                own.keys, own.values = (
                    kept[row, :, :length].expand(count, -1, -1, -1)
                    for kept in (mine.keys, mine.values)
                )
        return other

    def accept(self, first: Tensor, counts: Tensor, rows: Tensor) -> None:
        """Keep, for the texts `rows` (r,) that go on, `counts` (r,) tokens from node `first` (r,).

        Everything else of the chunk is forgotten, and so are the other texts.
        """
        before = self.lengths[rows]
        after = before + counts
        place = torch.arange(int(after.max()), device=rows.device).expand(len(rows), -1)
        new = self._prefix + first[:, None] + place - before[:, None]
        columns = torch.where(place < before[:, None], place, new)
        columns = torch.where(place < after[:, None], columns, torch.zeros_like(place))
        for layer in self.layers:
            layer.keep(rows, columns)
        self.lengths, self.starts = after, self.starts[rows]
        self._prefix = columns.shape[1]
