"""Texts that are one edit away from a text, those first whose vectors might be the same.

One vector stands for a whole text, so whatever changes the text is an alternative: another token at
a place, two tokens that change places, one token more, one less. Not all of a vocabulary can be run
at each place. With J_p the derivative of the vector by the embedding e_p of place p, token v
there gives about f + J_p (e_v − e_p); the tokens to try are those for which this is nearest to what
is wanted, y: least ‖J_p (e_v − e_p) − (y − f)‖². J_p is not formed. For g of independent standard
normal numbers, E (g·x)² = ‖x‖², so with 32 draws, one backward pass of a batch of 32,

    ‖x‖² ≈ mean_i (g_iᵀ J_p (e_v − e_p) − g_iᵀ (y − f))²  for all tokens at once.

With these come the tokens of most similar embedding, which the derivative at e_p may miss. A
token that is put in is tried as a copy of a neighbour, which changes little, and as the tokens that
the gradient of ‖f − y‖² at that copy asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.layers.inverse_map import most_similar

_PROBES = 32  # random directions that stand for all
_NEAREST = 8  # tokens of each place by the derivative
_WISHED = 4  # tokens put in at each place by the gradient
_PLACES = 64  # of a longer text the places whose tokens matter least
_PAIRS = 128  # pairs of tokens that change places, the nearest first
_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 12}  # in one forward–backward pass

Tokens = tuple[int, ...]


class Vectors:
    """The vectors of texts, each run once: `passes` counts them.

    The texts are around `ids`, with the same special tokens.
    """

    def __init__(self, target: Target, exposure: Exposure, ids: Sequence[int]) -> None:
        self.target, self.exposure = target, exposure
        self.before, self.after = _frame(target, ids)
        whole = replace(exposure, width=None, unit=False)
        self._encoder = Encoder(target, whole, frame=(self.before, self.after))
        self.passes = 0
        self.alternatives: dict[tuple[Tokens, bool], Alternatives] = {}
        self._whole: dict[Tokens, Tensor] = {}  # vectors before anything is cut off
        self._probed: dict[Tokens, tuple[Tensor, Tensor]] = {}

    def inside(self, ids: Sequence[int]) -> Tokens:
        return tuple(ids[len(self.before) : len(ids) - len(self.after)])

    def __call__(self, texts: Sequence[Tokens]) -> Tensor:
        """(b, k), without gradients."""
        fresh = list(dict.fromkeys(text for text in texts if text not in self._whole))
        if fresh:
            rows = self._encoder.values(self._table(fresh))
            self._whole.update(zip(fresh, rows, strict=True))
        self.passes += len(fresh)
        return self._part(torch.stack([self._whole[text] for text in texts]))

    def _table(self, texts: Sequence[Tokens]) -> Texts:
        return Texts.of(texts, max(map(len, texts)), self.target.parts.device)

    def _part(self, rows: Tensor) -> Tensor:
        """What is kept (b, k) of whole vectors (b, d)."""
        rows = rows[..., : self.exposure.width]
        return normalize(rows, dim=-1) if self.exposure.unit else rows

    def derivatives(self, texts: Sequence[Tokens], along: Tensor) -> Tensor:
        """The derivative (b, n, e) of each text's vector along (b, k), by token."""
        self.passes += len(texts)

        def projected(values: Tensor) -> Tensor:
            rows = self._part(values)
            return (rows * along.to(rows)).sum(-1)

        return self._encoder.gradient(self._table(texts), projected)[1]

    def probed(self, text: Tokens) -> tuple[Tensor, Tensor]:
        """Random directions (probes, k), and the derivative (probes, n, e) along each."""
        if text not in self._probed:
            own = self([text])[0]
            generator = torch.Generator().manual_seed(0)
            probes = torch.randn(_PROBES, len(own), generator=generator).to(own)
            size = max(1, _TOKENS[own.device.type] // (len(text) + 2))
            parts = [self.derivatives([text] * len(some), some) for some in probes.split(size)]
            self._probed[text] = probes, torch.cat(parts).float()
        return self._probed[text]


@dataclass(frozen=True, eq=False)
class Alternatives:
    """Texts one edit away, their vectors (r, k), and the tokens (r, n) that each edit touches."""

    texts: list[Tokens]
    vectors: Tensor
    touched: Tensor


NONE = Alternatives([], torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))


def alternatives_to(
    vectors: Vectors, text: Tokens, wanted: Tensor, same_length: bool
) -> Alternatives:
    """Texts one edit away for a vector `wanted` (k,); of the same length if that is known."""
    key = text, same_length
    own = vectors([text])[0]
    plain = torch.equal(wanted.to(own), own)  # as for every text that fits but for noise
    if plain and key in vectors.alternatives:
        return vectors.alternatives[key]
    tokens, near = _nearest(vectors, text, wanted)
    quiet = near.argsort()[:_PLACES].sort().values.tolist()
    edits = [*_replaced(text, tokens, quiet), *_swapped(text, quiet)]
    if not same_length:
        edits += _shorter(text, quiet)
        max_length = vectors.target.parts.max_length - len(vectors.before) - len(vectors.after)
        if len(text) < max_length:
            edits += _longer(vectors, text, wanted, quiet)
    texts = [edit for edit in dict.fromkeys(edits) if edit != text]
    touched = torch.tensor([_touched(text, edit) for edit in texts])
    alternatives = Alternatives(texts, vectors(texts), touched.view(len(texts), len(text)))
    if plain:
        vectors.alternatives[key] = alternatives
    return alternatives


def _nearest(vectors: Vectors, text: Tokens, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (n, m) to try at each place, and how near (n,) the nearest comes to first order."""
    table = vectors.target.parts.table.float()
    own = vectors([text])[0]
    probes, slopes = vectors.probed(text)
    off = probes @ (wanted.to(own) - own)
    ids = torch.tensor(text, device=table.device)
    tokens: list[Tensor] = []
    near: list[Tensor] = []
    for place, id_ in enumerate(text):
        answers = table @ slopes[:, place].T
        far = (answers - answers[id_] - off).square().mean(-1)
        far[[id_, *vectors.target.pads()]] = torch.inf
        least = far.topk(min(_NEAREST, len(far) - 1), largest=False)
        tokens.append(least.indices)
        near.append(least.values[0])
    similar = most_similar(table, ids).T
    return torch.cat([torch.stack(tokens), similar], -1), torch.stack(near)


def _replaced(text: Tokens, tokens: Tensor, places: list[int]) -> list[Tokens]:
    chosen = tokens.tolist()
    return [
        (*text[:place], token, *text[place + 1 :]) for place in places for token in chosen[place]
    ]


def _swapped(text: Tokens, places: list[int]) -> list[Tokens]:
    pairs = [(a, b) for a in places for b in places if a < b]
    pairs.sort(key=lambda pair: pair[1] - pair[0])
    edits: list[Tokens] = []
    for a, b in pairs[:_PAIRS]:
        edit = list(text)
        edit[a], edit[b] = edit[b], edit[a]
        edits.append(tuple(edit))
    return edits


def _shorter(text: Tokens, places: list[int]) -> list[Tokens]:
    if len(text) < 2:
        return []
    return [(*text[:place], *text[place + 1 :]) for place in places]


def _longer(vectors: Vectors, text: Tokens, wanted: Tensor, places: list[int]) -> list[Tokens]:
    """One token more: a copy of a neighbour, and what the gradient there asks for."""
    if not text:
        return []
    gaps = sorted({gap for place in places for gap in (place, place + 1)})
    copies = [(*text[:gap], text[max(gap - 1, 0)], *text[gap:]) for gap in gaps]
    table = vectors.target.parts.table.float()
    off = vectors(copies) - wanted.to(table.device)
    size = max(1, _TOKENS[table.device.type] // (len(text) + 3))
    edits = list(copies)
    for start in range(0, len(gaps), size):
        some = slice(start, start + size)
        slopes = vectors.derivatives(copies[some], off[some])
        at = torch.tensor(gaps[some], device=table.device)
        change = slopes[torch.arange(len(at), device=table.device), at].float() @ table.T
        change[:, vectors.target.pads()] = torch.inf
        wished = change.topk(min(_WISHED, change.shape[1]), largest=False).indices.tolist()
        for gap, tokens in zip(gaps[some], wished, strict=True):
            edits += [(*text[:gap], token, *text[gap:]) for token in tokens]
    return edits


def _touched(text: Tokens, edit: Tokens) -> list[bool]:
    """Which tokens of the text an edit changes; one put in touches its neighbours."""
    if len(text) == len(edit):
        return [a != b for a, b in zip(text, edit, strict=True)]
    first = next((p for p, (a, b) in enumerate(zip(text, edit, strict=False)) if a != b), None)
    place = min(len(text), len(edit)) if first is None else first
    if len(edit) < len(text):
        return [p == place for p in range(len(text))]
    return [p in (place - 1, place) for p in range(len(text))]


def _frame(target: Target, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokenizer's special tokens, if they stand around these ids."""
    before, after = target.frame()
    whole = list(ids)
    if len(whole) <= len(before) + len(after) or whole[: len(before)] != before:
        return [], []
    if after and whole[-len(after) :] != after:
        return [], []
    return before, after
