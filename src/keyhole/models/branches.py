"""A KV cache from which many continuations branch: a candidate costs one token's forward pass.

To test many tokens after one prefix, the usual way repeats the prefix's cache for each
of them. Here the candidates are one chunk after the prefix, and the attention mask
limits what each attends to: the prefix, and within the chunk either itself alone (a
fan: candidates for one position) or all tokens up to it (a chain: a guess of the next
tokens). So the prefix is stored once, and memory is linear in its length. The texts of
a batch may have prefixes of different lengths, and some a fan while others have a
chain.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.models.anatomy import NO_LIMIT, Anatomy, anatomy
from keyhole.models.capture import Exposure, capture

# Arithmetic in another order may change a state by this share of its length, by this
# many roundings of the model's precision, and by this multiple of the change in the
# layer below.
_TOLERANCE = 1e-3
_ROUNDINGS = 4
_GROWTH = 2.0
_CHUNK = 128  # candidates that share one copy of the prefix
# cuDNN's attention makes a plan for every new shape, and each token makes the prefix
# longer.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Layer:
    """One layer's keys and values, (texts, heads, columns, size): the prefix, then the chunk."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], -2)
            values = torch.cat([self.values, values], -2)
        self.keys = keys
        self.values = values
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
    """The cache of each text's prefix; `expose` tries tokens after it.

    It replaces the cache of transformers (`update`, `get_seq_length`, `layers`).
    `starts` (b,) counts the positions of padding before each text. Some models take no
    such cache, or answer otherwise with it; others attend to a window, and a text grows
    longer than that. Then every prefix is run again (`_without_cache`).
    """

    def __init__(self, model: nn.Module, starts: Tensor) -> None:
        self.model = model
        self.parts = anatomy(model)
        self.starts = starts
        self.lengths = torch.zeros_like(starts)
        self.layers = [_Layer() for _ in range(self.parts.layers)]
        self.positions = starts[:, None]  # of the last chunk's tokens
        # if nothing follows it, a pass drops each layer's keys
        self._final_pass = False
        self._columns = 0  # of the cache, before the chunk
        self._chunk = starts[:, None]
        # padding, then tokens
        self._texts = [starts.new_zeros(start) for start in starts.tolist()]
        self._cached = _takes_branches(self.parts)
        # Only texts longer than a window would show it, and those have thousands of
        # tokens.
        window = getattr(self.parts.base.config, "sliding_window", None)
        self._window = window or NO_LIMIT

    def update(
        self,
        keys: Tensor,
        values: Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor]:
        if self._final_pass and layer_idx:
            self.layers[layer_idx - 1] = _Layer()
        return self.layers[layer_idx].extend(keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self._columns

    def expose(
        self,
        exposure: Exposure,
        chain: Tensor,
        ids: Tensor,
        counts: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the exposure for a chunk of q tokens `ids` (b, q) after each prefix.

        `chain` (b,) is true where the chunk is a chain, and false where it is a fan.
        `counts` (b,) is how many of its tokens are real (None: all); the others are
        padding. Padding has the position of the last real token, so that it does not
        make a text longer than a window. `accept` must follow.
        """
        depth = torch.where(
            chain[:, None], torch.arange(ids.shape[1], device=ids.device), 0
        )
        if counts is not None:
            depth = depth.minimum(counts[:, None] - 1)
        self.positions = (self.starts + self.lengths)[:, None] + depth
        self._chunk = ids
        if self._window < NO_LIMIT:
            self._cached &= int(self.positions.max()) < self._window
        if self._cached:
            try:
                return self._with_cache(exposure, chain, ids)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # GPT-Neo's own mask ends with its positions
                self._cached = False
        texts = zip(self._texts, self.starts.tolist(), chain.tolist(), ids, strict=True)
        exposed = [self._without_cache(exposure, *text) for text in texts]
        return {
            name: torch.stack([text[name] for text in exposed]) for name in exposed[0]
        }

    def go_on(self, exposure: Exposure, ids: Tensor) -> dict[str, Tensor]:
        """Return the exposure for tokens `ids` (b, q) after each prefix, and add them to it."""
        rows = torch.arange(len(ids), device=ids.device)
        zeros = torch.zeros_like(rows)
        exposed = self.expose(exposure, zeros == 0, ids)
        self.accept(zeros, zeros + ids.shape[1], rows)
        return exposed

    def _with_cache(
        self,
        exposure: Exposure,
        chain: Tensor,
        ids: Tensor,
    ) -> dict[str, Tensor]:
        size = ids.shape[1]
        device = ids.device
        square = torch.ones(size, size, dtype=torch.bool, device=device)
        inside = torch.where(chain[:, None, None], square.tril(), square.tril().triu())
        columns = torch.arange(self._columns, device=device)
        prefix = (columns < self.lengths[:, None])[:, None].expand(-1, size, -1)
        visible = torch.cat([prefix, inside], -1)
        dtype = self.parts.tokens.weight.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
        with sdpa_kernel(_KERNELS):
            exposed = capture(
                self.model,
                exposure,
                ids=ids,
                mask=mask,
                position_ids=self.positions,
                past_key_values=self,
            )
        # Keys and values of a cache include the prefix.
        return {name: tensor[..., -size:, :] for name, tensor in exposed.items()}

    def _without_cache(
        self,
        exposure: Exposure,
        prefix: Tensor,
        start: int,
        chain: bool,
        chunk: Tensor,
    ) -> dict[str, Tensor]:
        """Run one text's prefix again: once before a chain, else before each token."""
        after = chunk[None] if chain else chunk[:, None]
        ids = torch.cat([prefix.expand(len(after), -1), after], 1)
        mask = None
        if start:
            mask = torch.ones_like(ids)
            mask[:, :start] = 0
        exposed = capture(self.model, exposure, ids=ids, mask=mask)
        if chain:
            return {
                name: tensor[0][..., -len(chunk) :, :]
                for name, tensor in exposed.items()
            }
        return {
            name: tensor[..., -1, :].movedim(0, -2) for name, tensor in exposed.items()
        }

    def each(
        self,
        exposure: Exposure,
        row: int,
        length: int,
        tokens: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the exposure of tokens (k,), each alone after a text's first `length` tokens.

        The tensors, and the positions (1, k), are those of one text of k tokens. The
        cache remains as it is.
        """
        count = -(-len(tokens) // _CHUNK)
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

    def chains(
        self,
        exposure: Exposure,
        row: int,
        length: int,
        ids: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the exposure of chains `ids` (k, q) after a text's first `length` tokens.

        The tensors, and the positions (k, q), are those of k texts. The cache remains
        as it is.
        """
        prefix = self._repeated(row, len(ids), length)
        chain = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        return prefix.expose(exposure, chain, ids), prefix.positions

    def at_once(self, length: int) -> int:
        """Return how many tokens fit into a pass of `each` after a prefix, by the free memory."""
        parts = self.parts
        # as they are cached, and as queries use them
        heads = parts.key_heads + parts.heads
        kept = 2 * heads * parts.head_dim * (1 + length / _CHUNK)
        return _CHUNK * max(1, parts.at_once(length + _CHUNK, kept=kept) // _CHUNK)

    def _repeated(
        self,
        row: int,
        count: int,
        length: int,
    ) -> Branches:
        """Return the first `length` tokens of one text's prefix, `count` times."""
        other = Branches(self.model, self.starts[row].expand(count))
        other.lengths = torch.full_like(other.starts, length)
        other._columns = length
        other._final_pass = True
        other._cached = self._cached
        other._texts = [self._texts[row][: int(self.starts[row]) + length]] * count
        for mine, own in zip(self.layers, other.layers, strict=True):
            if mine.keys is not None and mine.values is not None:
                own.keys, own.values = (
                    kept[row, :, :length].expand(count, -1, -1, -1)
                    for kept in (mine.keys, mine.values)
                )
        return other

    def accept(
        self,
        first: Tensor,
        counts: Tensor,
        rows: Tensor,
    ) -> None:
        """Keep, for the texts `rows` (r,), `counts` (r,) tokens of the chunk from `first` (r,) on.

        The rest of the chunk is dropped, and so are the other texts.
        """
        before = self.lengths[rows]
        after = before + counts
        self._texts = [
            torch.cat([self._texts[row], self._chunk[row, start : start + count]])
            for row, start, count in torch.stack([rows, first, counts], 1).tolist()
        ]
        place = torch.arange(int(after.max()), device=rows.device).expand(len(rows), -1)
        new = self._columns + first[:, None] + place - before[:, None]
        columns = torch.where(place < before[:, None], place, new)
        columns = torch.where(place < after[:, None], columns, torch.zeros_like(place))
        for layer in self.layers if self._cached else ():
            layer.keep(rows, columns)
        self.lengths = after
        self.starts = self.starts[rows]
        self._columns = columns.shape[1]


_TAKES = weakref.WeakKeyDictionary[nn.Module, bool]()


def _takes_branches(parts: Anatomy) -> bool:
    """Return whether the model gives the same states with a cache that branches as without."""
    if parts.base not in _TAKES:
        _TAKES[parts.base] = True  # for the trial
        try:
            _TAKES[parts.base] = _agrees(parts)
        except Exception:  # a model that takes no such cache raises anything
            _TAKES[parts.base] = False
    return _TAKES[parts.base]


@torch.no_grad()
def _agrees(parts: Anatomy) -> bool:
    """Rounding errors grow little from layer to layer; a larger change is another answer."""
    ids = torch.arange(len(parts.table), device=parts.device)[-5:]
    texts = torch.stack([ids[[0, 1, 2, 3]], ids[[0, 1, 2, 4]]])
    least = max(_TOLERANCE, _ROUNDINGS * torch.finfo(parts.tokens.weight.dtype).eps)
    below = 0.0
    for layer in range(1, parts.layers + 1):
        exposure = Exposure("hidden", layer)
        branches = Branches(parts.base, ids.new_zeros(1))
        branches.go_on(exposure, ids[None, :3])
        fan = branches.expose(
            exposure, torch.tensor([False], device=ids.device), ids[None, 3:]
        )
        whole = capture(parts.base, exposure, ids=texts)["values"][:, -1]
        error = float((fan["values"][0] - whole).norm() / whole.norm())
        if not error <= least + _GROWTH * below:  # false for NaN, too
            return False
        below = error
    return True
