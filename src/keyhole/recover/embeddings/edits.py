"""The alternatives to a text: texts one edit away, first those whose vectors may be the same.

One vector stands for a whole text, so whatever changes the text is an alternative:
another token at a place, two tokens exchanged, one token more, one less. Not all tokens
of a vocabulary can be run at each place. With J_p the derivative of the vector by the
embedding e_p at place p, token v there gives about f + J_p (e_v − e_p). The tokens to
try are those for which this is nearest to the wanted vector y, with the least ‖J_p (e_v
− e_p) − (y − f)‖². J_p itself is not computed: E (g·x)² = ‖x‖² for independent standard
normal numbers g, so with 32 draws, from one backward pass of a batch of 32,

    ‖x‖² ≈ mean_i (g_iᵀ J_p (e_v − e_p) − g_iᵀ (y − f))²  for all tokens at once.

The tokens of most similar embedding are tried too, because the derivative at e_p may
miss them. A token is inserted as a copy of a neighbour, which changes little, and as
the tokens that the gradient of ‖f − y‖² at that copy suggests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.tensors import normalized, row_numbers, seeded
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.layers.inverse_map import most_similar

_PROBES = 32  # random directions
_NEAREST = 8  # tokens tried at each place by the derivative
_WISHED = 4  # tokens inserted into each gap by the gradient
_PLACES = 64  # places of a long text that are tried: those whose tokens matter least
_PAIRS = 128  # pairs of tokens that are exchanged, the closest first
_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 12}  # in one forward–backward pass

Tokens = tuple[int, ...]


class Vectors:
    """The vectors of texts, each text run once; `passes` counts them.

    All texts get the special tokens that stand around `ids`.
    """

    def __init__(
        self,
        target: Target,
        exposure: Exposure,
        ids: Sequence[int],
    ) -> None:
        self.target = target
        self.exposure = exposure
        before, after = target.frame()
        inside = ids[len(before) : len(ids) - len(after)]
        framed = bool(inside) and [*before, *inside, *after] == list(ids)
        self.before = before if framed else []
        self.after = after if framed else []
        whole = replace(exposure, width=None, unit=False)
        self._encoder = Encoder(target, whole, frame=(self.before, self.after))
        self.passes = 0
        self.alternatives: dict[tuple[Tokens, bool], Alternatives] = {}
        self._whole: dict[Tokens, Tensor] = {}  # vectors with all their numbers
        self._probed: dict[Tokens, tuple[Tensor, Tensor]] = {}

    def inside(self, ids: Sequence[int]) -> Tokens:
        """Return the ids without the special tokens around them."""
        return tuple(ids[len(self.before) : len(ids) - len(self.after)])

    def __call__(self, texts: Sequence[Tokens]) -> Tensor:
        """Return the vectors (b, k) of texts, without gradients."""
        fresh = [text for text in dict.fromkeys(texts) if text not in self._whole]
        if fresh:
            rows = self._encoder.values(self._table(fresh))
            self._whole.update(zip(fresh, rows, strict=True))
        self.passes += len(fresh)
        return self._part(torch.stack([self._whole[text] for text in texts]))

    def _table(self, texts: Sequence[Tokens]) -> Texts:
        return Texts.of(texts, max(map(len, texts)), self.target.device)

    def _part(self, rows: Tensor) -> Tensor:
        """Return the part (b, k) of whole vectors (b, d) that the exposure keeps."""
        rows = rows[..., : self.exposure.width]
        return normalized(rows) if self.exposure.unit else rows

    def derivatives(self, texts: Sequence[Tokens], along: Tensor) -> Tensor:
        """Return the derivative (b, n, e) of each text's vector along (b, k), by token."""
        self.passes += len(texts)

        def projected(values: Tensor) -> Tensor:
            rows = self._part(values)
            return (rows * along.to(rows)).sum(-1)

        return self._encoder.gradient(self._table(texts), projected)[1]

    def probed(self, text: Tokens) -> tuple[Tensor, Tensor]:
        """Return random directions (probes, k), and the derivative (probes, n, e) along each."""
        if text not in self._probed:
            own = self([text])[0]
            probes = torch.randn(_PROBES, len(own), generator=seeded(0)).to(own)
            parts = probes.split(max(1, _TOKENS[own.device.type] // (len(text) + 2)))
            slopes = [self.derivatives([text] * len(part), part) for part in parts]
            self._probed[text] = probes, torch.cat(slopes).float()
        return self._probed[text]


class Alternatives(NamedTuple):
    """Texts one edit away, their vectors (r, k), and which tokens (r, n) each edit touches."""

    texts: list[Tokens]
    vectors: Tensor
    touched: Tensor


NONE = Alternatives([], torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))


def alternatives_to(
    vectors: Vectors,
    text: Tokens,
    wanted: Tensor,
    same_length: bool,
) -> Alternatives:
    """Return the texts one edit away for a vector `wanted` (k,).

    Tokens are inserted and deleted unless the text must have the `same_length`.
    """
    key = text, same_length
    own = vectors([text])[0]
    # so it is for every text that fits without noise
    plain = torch.equal(wanted.to(own), own)
    if plain and key in vectors.alternatives:
        return vectors.alternatives[key]
    tokens, near = _nearest(vectors, text, wanted)
    quiet: list[int] = near.argsort()[:_PLACES].sort().values.tolist()
    edits: list[Tokens] = []
    for place in quiet:
        for token in tokens[place].tolist():
            edits.append((*text[:place], token, *text[place + 1 :]))
    pairs = sorted(combinations(quiet, 2), key=lambda pair: pair[1] - pair[0])
    for a, b in pairs[:_PAIRS]:
        edits.append((*text[:a], text[b], *text[a + 1 : b], text[a], *text[b + 1 :]))
    if not same_length:
        if len(text) > 1:
            edits += [(*text[:place], *text[place + 1 :]) for place in quiet]
        special = len(vectors.before) + len(vectors.after)
        if 0 < len(text) < vectors.target.parts.max_length - special:
            edits += _longer(vectors, text, wanted, quiet)
    texts = [edit for edit in dict.fromkeys(edits) if edit != text]
    touched = torch.tensor([_touched(text, edit) for edit in texts])
    touched = touched.view(len(texts), len(text))
    alternatives = Alternatives(texts, vectors(texts), touched)
    if plain:
        vectors.alternatives[key] = alternatives
    return alternatives


def _nearest(
    vectors: Vectors,
    text: Tokens,
    wanted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return tokens (n, m) to try at each place, and how near (n,) the nearest one comes."""
    table = vectors.target.table
    own = vectors([text])[0]
    probes, slopes = vectors.probed(text)
    off = probes @ (wanted.to(own) - own)
    tokens: list[Tensor] = []
    near: list[Tensor] = []
    for place, id_ in enumerate(text):
        answers = table @ slopes[:, place].T
        far = (answers - answers[id_] - off).square().mean(-1)
        far[[id_, *vectors.target.pads()]] = torch.inf
        least = far.topk(min(_NEAREST, len(far) - 1), largest=False)
        tokens.append(least.indices)
        near.append(least.values[0])
    similar = most_similar(table, vectors.target.tensor(text)).T
    return torch.cat([torch.stack(tokens), similar], -1), torch.stack(near)


def _longer(
    vectors: Vectors,
    text: Tokens,
    wanted: Tensor,
    places: list[int],
) -> list[Tokens]:
    """Return texts with one token more: a copy of a neighbour, or what the gradient suggests."""
    gaps = sorted({gap for place in places for gap in (place, place + 1)})
    copies = [(*text[:gap], text[max(gap - 1, 0)], *text[gap:]) for gap in gaps]
    table = vectors.target.table
    off = vectors(copies) - wanted.to(table.device)
    size = max(1, _TOKENS[table.device.type] // (len(text) + 3))
    edits = list(copies)
    for start in range(0, len(gaps), size):
        some = slice(start, start + size)
        slopes = vectors.derivatives(copies[some], off[some])
        at = vectors.target.tensor(gaps[some])
        change = slopes[row_numbers(at), at].float() @ table.T
        change[:, vectors.target.pads()] = torch.inf
        wished = change.topk(min(_WISHED, change.shape[1]), largest=False).indices
        for gap, tokens in zip(gaps[some], wished.tolist(), strict=True):
            edits += [(*text[:gap], token, *text[gap:]) for token in tokens]
    return edits


def _touched(text: Tokens, edit: Tokens) -> list[bool]:
    """Return which tokens of the text an edit changes; an inserted one touches its neighbours."""
    pairs = list(zip(text, edit, strict=False))
    if len(text) == len(edit):
        return [a != b for a, b in pairs]
    place = next((p for p, (a, b) in enumerate(pairs) if a != b), len(pairs))
    first = place if len(edit) < len(text) else place - 1
    return [first <= each <= place for each in range(len(text))]
