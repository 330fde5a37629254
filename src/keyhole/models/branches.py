"""A KV cache from which many continuations branch: a candidate costs one token's forward pass.

To test many tokens after one prefix, the usual way repeats the prefix's cache for each of them.
Here the candidates are one chunk behind the prefix, and the attention mask says what each may see:
the prefix, and in the chunk itself alone (a fan: candidates for one position) or all before it too
(a chain: a guess of the next tokens). So the prefix is stored once, and memory is linear in its
length. Texts of one batch may have prefixes of different lengths, and some a fan while others have
a chain.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.models.anatomy import NO_LIMIT, Anatomy, anatomy
from keyhole.models.capture import Exposure, capture

_AGREES = 1e-3  # of a state's length: how far arithmetic in another order may be off, …
_ROUNDINGS = 4  # … in roundings of the model's own arithmetic, …
_GROWTH = 2.0  # … and against the layer below
_ROW = 128  # candidates that share one copy of the prefix
# cuDNN's attention makes a plan for every new shape, and each token makes the prefix longer.
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
    `starts` (b,) counts the positions of padding before each text. A model that takes no such
    cache, or answers otherwise with it, runs every prefix again (`_again`); so does one whose
    tokens see no further than a window, once a text is longer.
    """

    def __init__(self, model: nn.Module, starts: Tensor) -> None:
        self.model = model
        self.parts = anatomy(model)
        self.starts = starts
        self.lengths = torch.zeros_like(starts)
        self.layers = [_Layer() for _ in range(self.parts.layers)]
        self.positions = starts[:, None]  # of the last chunk's tokens
        self._passing = False  # nothing goes on from here: a layer's keys are gone after it
        self._prefix = 0  # columns before the chunk
        self._chunk = starts[:, None]
        self._texts = [starts.new_zeros(start) for start in starts.tolist()]  # padding, then tokens
        self._branches = _takes_branches(self.parts)
        # Only texts longer than a window show it, and those have thousands of tokens: not run.
        self._window = getattr(self.parts.base.config, "sliding_window", None) or NO_LIMIT

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self._passing and layer_idx:
            self.layers[layer_idx - 1] = _Layer()
        return self.layers[layer_idx].extend(keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self._prefix

    def expose(
        self, exposure: Exposure, chain: Tensor, ids: Tensor, counts: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The exposure for a chunk of q tokens `ids` (b, q) behind each prefix.

        `chain` (b,) says whose chunk is a chain; the others' are fans. Of each, `counts` (b,) are
        tokens (None: all); the rest pads it, and stays at the last one's position, so that no short
        text seems to leave a window. `accept` must follow.
        """
        depth = torch.where(chain[:, None], torch.arange(ids.shape[1], device=ids.device), 0)
        if counts is not None:
            depth = depth.minimum(counts[:, None] - 1)
        self.positions = (self.starts + self.lengths)[:, None] + depth
        self._chunk = ids
        if self._window < NO_LIMIT:
            self._branches &= int(self.positions.max()) < self._window
        if self._branches:
            try:
                return self._behind_cache(exposure, chain, ids)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # GPT-Neo's own mask ends with its positions
                self._branches = False
        each = zip(self._texts, self.starts.tolist(), chain.tolist(), ids, strict=True)
        given = [self._again(exposure, *text) for text in each]
        return {name: torch.stack([text[name] for text in given]) for name in given[0]}

    def go_on(self, exposure: Exposure, ids: Tensor) -> dict[str, Tensor]:
        """The exposure for tokens `ids` (b, q) behind each prefix, which they are part of then."""
        each = torch.arange(len(ids), device=ids.device)
        none = torch.zeros_like(each)
        given = self.expose(exposure, none == 0, ids)
        self.accept(none, none + ids.shape[1], each)
        return given

    def _behind_cache(self, exposure: Exposure, chain: Tensor, ids: Tensor) -> dict[str, Tensor]:
        size, device = ids.shape[1], ids.device
        square = torch.ones(size, size, dtype=torch.bool, device=device)
        inside = torch.where(chain[:, None, None], square.tril(), square.tril().triu())
        columns = torch.arange(self._prefix, device=device)
        prefix = (columns < self.lengths[:, None])[:, None].expand(-1, size, -1)
        sees = torch.cat([prefix, inside], -1)
        dtype = self.parts.tokens.weight.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]
        with sdpa_kernel(_KERNELS):
            exposed = capture(
                self.model, exposure, ids=ids, mask=mask, position_ids=self.positions,
                past_key_values=self,
            )  # fmt: skip
        # A cache holds the prefix as well; only the chunk is asked about.
        return {name: tensor[..., -size:, :] for name, tensor in exposed.items()}

    def _again(
        self, exposure: Exposure, prefix: Tensor, start: int, chain: bool, chunk: Tensor
    ) -> dict[str, Tensor]:
        """The same for one text, its prefix run again: for a chain once, else for each token."""
        behind = chunk[None] if chain else chunk[:, None]
        ids = torch.cat([prefix.expand(len(behind), -1), behind], 1)
        mask = None
        if start:
            mask = torch.ones_like(ids)
            mask[:, :start] = 0
        given = capture(self.model, exposure, ids=ids, mask=mask)
        if chain:
            return {name: tensor[0][..., -len(chunk) :, :] for name, tensor in given.items()}
        return {name: tensor[..., -1, :].movedim(0, -2) for name, tensor in given.items()}

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
        parts = self.parts
        heads = parts.key_heads + parts.heads  # as they are kept, and one for each query's head
        kept = 2 * heads * parts.head_dim * (1 + length / _ROW)
        return _ROW * max(1, parts.at_once(length + _ROW, kept=kept) // _ROW)

    def _repeated(self, row: int, count: int, length: int) -> Branches:
        """The beginning of one text's prefix, `count` times: for as many chunks."""
        other = Branches(self.model, self.starts[row].expand(count))
        other.lengths = torch.full_like(other.starts, length)
        other._prefix, other._passing, other._branches = length, True, self._branches
        other._texts = [self._texts[row][: int(self.starts[row]) + length]] * count
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
        self._texts = [
            torch.cat([self._texts[row], self._chunk[row, start : start + count]])
            for row, start, count in torch.stack([rows, first, counts], 1).tolist()
        ]
        place = torch.arange(int(after.max()), device=rows.device).expand(len(rows), -1)
        new = self._prefix + first[:, None] + place - before[:, None]
        columns = torch.where(place < before[:, None], place, new)
        columns = torch.where(place < after[:, None], columns, torch.zeros_like(place))
        for layer in self.layers if self._branches else ():
            layer.keep(rows, columns)
        self.lengths, self.starts = after, self.starts[rows]
        self._prefix = columns.shape[1]


_TAKES: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _takes_branches(parts: Anatomy) -> bool:
    """Does the model, with a cache that branches, answer as it does to whole texts?"""
    if parts.base not in _TAKES:
        _TAKES[parts.base] = True  # so that it is tried
        try:
            _TAKES[parts.base] = _agrees(parts)
        except Exception:  # whatever it says about arguments that it does not know
            _TAKES[parts.base] = False
    return _TAKES[parts.base]


@torch.no_grad()
def _agrees(parts: Anatomy) -> bool:
    """Rounding errors grow from layer to layer, by little each; another answer is a leap."""
    ids = torch.arange(len(parts.table), device=parts.device)[-5:]
    texts = torch.stack([ids[[0, 1, 2, 3]], ids[[0, 1, 2, 4]]])
    least = max(_AGREES, _ROUNDINGS * torch.finfo(parts.tokens.weight.dtype).eps)
    before = 0.0
    for layer in range(1, parts.layers + 1):
        exposure = Exposure("hidden", layer)
        branches = Branches(parts.base, ids.new_zeros(1))
        branches.go_on(exposure, ids[None, :3])
        fan = branches.expose(exposure, torch.tensor([False], device=ids.device), ids[None, 3:])
        whole = capture(parts.base, exposure, ids=texts)["values"][:, -1]
        off = float((fan["values"][0] - whole).norm() / whole.norm())
        if not off <= least + _GROWTH * before:  # nor is NaN an agreement
            return False
        before = off
    return True
