"""The texts of a batch, formed of the tokens that may stand at each position and tested by spans.

`DecoderTexts` and `EncoderTexts` take these tokens and the span of the second
attention's inputs (span.py), and yield the ids of texts, the surest first.

**A causal model** (`DecoderTexts`; DAGER, arXiv 2405.15586). What the second attention
receives at position t depends only on the tokens up to t, so a prefix lies in the span
of its gradient exactly if some text of the batch begins with it. All prefixes are
extended side by side by all tokens of the batch. The prefix's keys and values are kept
(models/branches.py), so that trying a token costs a token's pass through one block. A
prefix that no token extends is a text.

A model with rotary positions gives the same row for a token repeated as for the token
alone, because attention over equal values is that value. Such a token proves nothing:
it stays only if something else follows after a few repetitions at most.

**An encoder** (`EncoderTexts`, ours). The inputs of the first attention do not show
which tokens form a text. But the attention's result for a text lies, at every position,
in the span of its output map's gradient if all tokens of the text are right. So a text
starts from one token whose place is clear, and from the tokens at other positions whose
gradients resemble it (`Places`). Least squares over all tokens at all positions correct
it (`Contexts`); where that fails, tokens are changed one by one to bring it nearer to
the span. A text is accepted if the inputs of the second attention lie in the span of
its gradient as well. The tokens of accepted texts are not looked for again. DAGER
instead combines all tokens that may stand at each position, which takes time
exponential in a text's length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core import not_applicable
from keyhole.core.tensors import normalized, row_numbers, squared_norms
from keyhole.models.anatomy import Anatomy, Projection
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.gradients.span import FirstInputs, Span, attention_inputs

# Of a causal model
_SAME = 1e-4  # of a row's length: rows nearer than this count as equal
_MORE = 2  # times the texts of a batch: prefixes that are extended
_REPEATED = 4  # times that a text's first token may follow itself
_OUT = 6.0  # median deviations from the median of a distance that stands out
# Of an encoder
_WON = 0.999  # of the misfit: a sweep that leaves more than that is the last
_NEAR = 5e-3  # the misfit below which clear tokens may be changed too
_CLEAR = 0.7  # the share of a token from which on it stands only there
_OFF = 0.15  # the largest difference from 1 of a clear token's share
_ELSEWHERE = 0.35  # the largest share of a clear token at another position
_RIDGE = 1e-3  # of the mean square: the weight of the prior
_ROWS = 16  # rows of a text that masses are computed from
_RELIABLE = 0.3  # the least mass of a token whose row is used
_KEPT = 24  # tokens that may stand at a position after the first step
_ENDS = 3  # ends of a text that are tried at each step
_ALIKE = 0.65  # the least resemblance of a clear token to the others of its text
_RANK = 1e-9  # of the largest singular value: smaller ones count as zero
_WHOLE = 0.8  # the share of a token that counts in a text's direction
_GROWING = (
    3,
    6,
    10,
)  # tokens of a text that its direction is computed from, step by step
_STARTS = 6  # starts that may fail for each text before the search ends
_STEPS = 8  # least squares steps for each start
_SWEEPS = 8  # sweeps over the tokens of a text
_FEW = 32  # tokens that the first sweeps try at each position


class _Prefix(NamedTuple):
    """Ids, how many of the first ones are proven by a row of their own, and the last row."""

    ids: tuple[int, ...]
    proven: int
    row: Tensor | None


@dataclass(eq=False)
class DecoderTexts:
    """The search for the texts of a batch, of the `tokens` that may stand at each position.

    A single entry of `tokens` is for all positions. Where errors or a low rank blur the
    span, the next tokens are those `standing_out` from the others by their distance.
    """

    target: Target
    span: Span
    tokens: Sequence[Tensor]
    texts: int
    max_length: int
    standing_out: bool = False

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[int]]:
        device = self.target.parts.device
        branches = Branches(
            self.target.model, torch.zeros(1, dtype=torch.long, device=device)
        )
        active = [_Prefix((), 0, None)]
        ended: list[_Prefix] = []
        # A model without embeddings of positions has the same tokens everywhere.
        everywhere = len(self.tokens) == 1
        tokens = repeat(self.tokens[0]) if everywhere else self.tokens
        for some in islice(tokens, self.max_length):
            longer = self._longer(branches, active, some)
            going = {parent for parent, _, _ in longer}
            ended += [
                prefix for number, prefix in enumerate(active) if number not in going
            ]
            active = [prefix for _, _, prefix in longer]
            if not longer:
                break
            parents = torch.tensor([parent for parent, _, _ in longer], device=device)
            first = torch.tensor([node for _, node, _ in longer], device=device)
            branches.accept(first, torch.ones_like(first), parents)
        yield from _distinct([*ended, *active])

    def _longer(
        self,
        branches: Branches,
        active: Sequence[_Prefix],
        tokens: Tensor,
    ) -> list[tuple[int, int, _Prefix]]:
        """Return (prefix, node, longer prefix) of those in the span, the nearest first."""
        chain = torch.zeros(len(active), dtype=torch.bool, device=tokens.device)
        ids = tokens.expand(len(active), -1)
        states = branches.expose(Exposure("hidden", 1), chain, ids=ids)["values"]
        rows = attention_inputs(self.target.parts, 2, states)  # (b, c, d)
        far = self.span.distance(rows)
        most = self.span.tolerance
        if self.standing_out:
            middle = far.median()
            most = float(middle - _OUT * (far - middle).abs().median())
        inside = (far <= most).nonzero()
        near: list[list[int]] = inside[
            far[inside[:, 0], inside[:, 1]].argsort()
        ].tolist()
        longer: list[tuple[int, int, _Prefix]] = []
        for parent, node in near[: _MORE * self.texts]:
            prefix = active[parent]
            row = rows[parent, node]
            ids = (*prefix.ids, int(tokens[node]))
            same = prefix.row is not None and bool(
                (row - prefix.row).norm() <= _SAME * row.norm()
            )
            proven = prefix.proven if same else len(ids)
            if len(ids) - proven > _REPEATED:
                continue
            longer.append((parent, node, _Prefix(ids, proven, row)))
        return longer


def _distinct(ended: Sequence[_Prefix]) -> Iterator[list[int]]:
    """Yield the proven part of each text, the longest first, unless another begins with it."""
    texts = sorted(
        {prefix.ids[: prefix.proven] for prefix in ended}, key=len, reverse=True
    )
    kept: list[tuple[int, ...]] = []
    for text in texts:
        if text and not any(longer[: len(text)] == text for longer in kept):
            kept.append(text)
            yield list(text)


class Read(NamedTuple):
    """A text's ids, whether all its rows lie in the span, and its mean squared distance from it."""

    ids: list[int]
    fits: bool
    misfit: float


class EncoderTexts:
    """The search for the texts of a batch.

    `span` is that of the second attention's inputs, `tokens` are those that may stand
    at each position, `places` says where they probably stand, and `contexts` compares
    texts with the gradient.
    """

    def __init__(
        self,
        target: Target,
        span: Span,
        contexts: Contexts,
        tokens: Sequence[Tensor],
        places: Places,
        texts: int,
    ) -> None:
        self.target = target
        self.span = span
        self.contexts = contexts
        self.places = places
        self.texts = texts
        self._exact = span.tolerance**2  # the misfit of a text that is right
        known = places.tokens
        (before, after) = target.frame()
        numbers = {int(id_): number for number, id_ in enumerate(known)}
        self._before = [numbers[id_] for id_ in before if id_ in numbers]
        self._after = [numbers[id_] for id_ in after if id_ in numbers]
        self._may = torch.stack([torch.isin(known, each) for each in tokens], 1)
        self._ends = [
            place
            for place in range(len(before), len(tokens) - len(self._after) + 1)
            if all(self._may[id_, place + off] for off, id_ in enumerate(self._after))
        ]
        self._closing = torch.zeros_like(self._may)
        for id_ in self._after[:1]:
            self._closing[id_, self._ends] = True
        special = torch.tensor([*before, *after, *target.pads()], device=known.device)
        self._may &= ~torch.isin(known, special)[:, None]
        order = places.shares.argsort(0, descending=True)
        self._likeliest = [
            column[may[column]]
            for column, may in zip(order.T, self._may.T, strict=True)
        ]
        # Shares that no text explains yet: texts start from them.
        self._left = places.shares.clamp(min=0) * self._may

    def __iter__(self) -> Iterator[Read]:
        """Yield each text once: first those that fit, then the others, the nearest first."""
        read: set[tuple[int, ...]] = set()
        others: dict[tuple[int, ...], Read] = {}
        # Easy texts make the others clearer. Where every text seems to fit, none is
        # easy.
        for sweeps in (0, _SWEEPS)[not self.span.sharp :]:
            failed = 0
            for number, place in self._starts():
                if failed >= _STARTS * (self.texts - len(read)):
                    break
                text = self._read(number, place, sweeps)
                key = tuple(text.ids)
                failed += 1
                if text.fits and key not in read:
                    failed = 0
                    read.add(key)
                    yield text
                elif not text.fits:
                    others[key] = text
        nearest = sorted(others.values(), key=lambda text: text.misfit)
        yield from nearest[: self.texts - len(read)]

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Yield tokens and places that no accepted text has, the clearest first."""
        tried = torch.zeros_like(self._left, dtype=torch.bool)
        while True:
            clear = (1 - (1 - self._left).abs()).masked_fill(
                tried, 0
            )  # 1 at a share of 1
            number, place = divmod(int(clear.argmax()), clear.shape[1])
            if clear[number, place] <= 0:
                return
            tried[number, place] = True
            yield number, place

    def _read(
        self,
        number: int,
        place: int,
        sweeps: int,
    ) -> Read:
        """Return the text nearest to the span in a search that starts from a token at a place."""
        text, misfit, clear = self._solved(number, place)
        # Where the span is not sharp, wrong texts reach the exact misfit too.
        if sweeps and not (misfit < self._exact and self.span.sharp):
            text, misfit = self._swept(text, misfit, clear)
        ids = self.places.tokens[text].tolist()
        read = Read(ids, misfit < math.inf and self._fits(ids), misfit)
        if read.fits:
            for at, each in enumerate(text.tolist()):
                whole = self.places.shares[each, at] > _CLEAR  # it stands nowhere else
                self._left[each, slice(None) if whole else at] = 0
        return read

    def _guess(self, number: int, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return how likely tokens (t, n) are in the text of a start, and the likeliest (n,).

        The third tensor (n,) says where that is clear: the token stands there and
        nowhere else.
        """
        alike = self.places.resemblance(number)[:, None].clamp(min=0)
        prior = self._left * alike.square()
        guess = (prior + self._may * 1e-9).argmax(0)
        guess[place] = number
        guess[: len(self._before)] = torch.tensor(self._before, device=guess.device)
        at = row_numbers(guess)
        elsewhere = self._left[guess].masked_fill(at[:, None] == at, 0).amax(1)
        off = (1 - self._left[guess, at]).abs()
        clear = (off < _OFF) & (elsewhere < _ELSEWHERE) & (alike[guess, 0] > _ALIKE)
        clear[place] = True
        clear[: len(self._before)] = True
        return prior.clamp(max=1), guess, clear

    def _solved(self, number: int, place: int) -> tuple[Tensor, float, Tensor]:
        """Return the best text that masses lead to, its misfit, and what was clear at first."""
        prior, guess, clear = self._guess(number, place)
        last = int(clear.nonzero().max())
        fixed = len(self._before)
        may = self._may | self._closing
        text, misfit = self._ended(guess, [end for end in self._ends if end > last])
        weights = clear[: len(text)].float()
        best = (text, misfit)
        seen = set[tuple[int, ...]]()
        while not misfit < self._exact and tuple(text.tolist()) not in seen:
            seen.add(tuple(text.tolist()))
            rows = weights.argsort(descending=True, stable=True)[:_ROWS]
            rows = rows[weights[rows] > _RELIABLE]
            masses = self.contexts.masses(text, rows, weights[rows], fixed, may, prior)
            least = (
                masses.masked_fill(~may, -math.inf)
                .topk(min(_KEPT, len(may)), 0)
                .values[-1]
            )
            may &= (masses >= least) | self._closing
            guess = masses.masked_fill(~self._may, -math.inf).argmax(0)
            guess[place] = number
            guess[:fixed] = text[:fixed]
            text, misfit = self._ended(guess, self._likely_ends(masses, place))
            weights = masses[text, row_numbers(text)].clamp(0, 1)
            weights[:fixed] = weights[place] = 1
            best = min(best, (text, misfit), key=lambda each: each[1])
            if len(seen) == _STEPS:
                break
        return *best, clear

    def _likely_ends(self, masses: Tensor, place: int) -> list[int]:
        """Return ends after a place, first those where the closing token has most mass."""
        most = torch.cat([masses.amax(0), torch.zeros(1).to(masses)])
        mass = masses[self._after[0]] if self._after else most.roll(1) - most
        ends = [end for end in self._ends if end > place]
        return sorted(ends, key=lambda end: -float(mass[end]))[:_ENDS]

    def _ended(self, guess: Tensor, ends: Sequence[int]) -> tuple[Tensor, float]:
        """Return the text nearest to the span that ends at one of the given positions."""
        after = torch.tensor(self._after, device=guess.device).long()
        texts = [torch.cat([guess[:end], after]) for end in ends]
        found = [(text, float(self.contexts.misfit(text))) for text in texts]
        return min(found, key=lambda each: each[1], default=(guess, math.inf))

    def _swept(
        self,
        text: Tensor,
        misfit: float,
        clear: Tensor,
    ) -> tuple[Tensor, float]:
        """Improve one token after the other, first where none is clear."""
        inside = list(range(len(self._before), len(text) - len(self._after)))
        free = [at for at in inside if not clear[at]]
        few = _FEW
        for _ in range(_SWEEPS):
            before = misfit
            for at in free:
                numbers = self._likeliest[at][:few]
                if not len(numbers):
                    continue
                misfits = self.contexts.changed(text, at, numbers)
                if misfits.min() < misfit:
                    text = text.clone()
                    misfit = float(misfits.min())
                    text[at] = numbers[misfits.argmin()]
            if misfit < self._exact:
                break
            if misfit > _WON * before:
                if few == len(self._may) or misfit > _NEAR:
                    break
                free = inside
                few = len(self._may)
        return text, misfit

    def _fits(self, ids: list[int]) -> bool:
        """Return whether every input of the second attention lies in its span."""
        given = torch.tensor([ids], device=self.target.parts.device)
        with torch.no_grad():
            states = capture(self.target.model, Exposure("hidden", 1), ids=given)[
                "values"
            ]
            far = self.span.distance(attention_inputs(self.target.parts, 2, states)[0])
        return bool((far <= self.span.tolerance).all())


# The result of the first attention for a text, and for all texts one token away from
# it.
#
# At position i head h gives c_i = Σ_j e_ij v_j / Σ_j e_ij with e_ij = exp(q_i·k_j/√k),
# and the heads side by side are the input of the attention's output map. For a text of
# the batch, the c_i lie in the span of that map's gradient, so only their products with
# directions R of the span's complement matter: v_j R replaces v_j. If a token changes
# at one position, both sums change by one term at all other positions: computing that
# is a thousand times cheaper than running the layer.
#
# All tokens of a text are found at once by least squares. With a mass z_vp of every
# token at every position, Σ_j runs over all pairs (v, p), and near a text c_i is linear
# in z:
#
#     c_i(z) R = c_i R + Σ_vp z_vp e_i,vp (v_vp − c_i) R / Σ_j e_ij.
#
# A row whose own token is right gives an equation c_i(z) R = 0 for each direction, so
# that a few such rows give more equations than the text has tokens. The heaviest tokens
# at each position are the next text, their masses show which of its rows to trust, and
# light tokens are dropped.


class Contexts(NamedTuple):
    """Queries and keys (t, n, h, k) of tokens at positions, and their values along directions.

    The values are (t, n, h, r). A text is given by the numbers (n,) of its tokens.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def misfit(self, text: Tensor) -> Tensor:
        """Return the mean squared distance of a text's rows from the span."""
        queries, keys, values = self._of(text)
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        rows = torch.einsum("hij,jhr->ir", scores.softmax(-1), values)
        return squared_norms(rows).mean()

    def _of(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = row_numbers(text)
        return (
            self.queries[text, places],
            self.keys[text, places],
            self.values[text, places],
        )

    def masses(
        self,
        text: Tensor,
        rows: Tensor,
        weights: Tensor,
        fixed: int,
        may: Tensor,
        prior: Tensor,
    ) -> Tensor:
        """Return the mass (t, n) of each token where it `may` stand, from some rows of a text.

        This is a ridge regression towards `prior`, near a text whose first `fixed`
        tokens are known.
        """
        queries, keys, values = self._of(text)
        queries = queries[rows]
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        total = scores.logsumexp(-1, keepdim=True)
        own = torch.einsum("hij,jhr->ihr", scores.softmax(-1), values)

        def columns(tokens: Tensor, places: Tensor) -> Tensor:
            share = (
                torch.einsum("ihk,chk->hic", queries, self.keys[tokens, places]) - total
            )
            share = share.clamp(max=0).exp()
            given = torch.einsum("hic,chr->irc", share, self.values[tokens, places])
            given -= torch.einsum("hic,ihr->irc", share, own)
            return (given * weights[:, None, None]).flatten(0, 1)

        tokens, places = may.nonzero().unbind(1)
        given = columns(tokens, places)
        before = prior[tokens, places].to(values)
        left = -(own.sum(1) * weights[:, None]).flatten() - given @ before
        left -= columns(text[:fixed], torch.arange(fixed, device=text.device)).sum(1)
        products = (given @ given.mT).double()
        ridge = _RIDGE * products.diagonal().mean().clamp(min=1e-30)
        solved = torch.linalg.solve(
            products + ridge * torch.eye(len(products)).to(products), left.double()
        )
        masses = torch.zeros_like(prior, dtype=values.dtype)
        masses[tokens, places] = before + given.mT @ solved.to(values)
        return masses

    def changed(
        self,
        text: Tensor,
        place: int,
        tokens: Tensor,
    ) -> Tensor:
        """Return the misfits (c,) of the text with each of the given tokens at one position."""
        queries, keys, values = self._of(text)
        others = row_numbers(text) != place
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp() * others
        total = weights.sum(
            -1, keepdim=True
        )  # (h, i, 1), without the position that changes
        rows = torch.einsum("hij,jhr->hir", weights, values)
        own = torch.einsum("ihk,thk->hit", queries, self.keys[tokens, place])
        new_values = self.values[tokens, place]
        own = (own - highest).exp()
        # The rows (h, i, t, r) are summed over heads one by one, to save memory.
        given = torch.zeros(len(text), len(tokens), values.shape[-1]).to(values)
        for head in range(values.shape[1]):
            new = rows[head][:, None] + own[head][..., None] * new_values[:, head]
            given += new / (total[head] + own[head])[..., None]
        far = (squared_norms(given) * others[:, None]).sum(0)
        return (far + self._own_rows(tokens, place, keys, values, others)) / len(text)

    def _own_rows(
        self,
        tokens: Tensor,
        place: int,
        keys: Tensor,
        values: Tensor,
        others: Tensor,
    ) -> Tensor:
        """Return the squared distances (c,) of the row at the changed position itself."""
        queries = self.queries[tokens, place]
        scores = torch.einsum("thk,jhk->htj", queries, keys)
        own = torch.einsum("thk,thk->ht", queries, self.keys[tokens, place])
        scores = scores.masked_fill(~others, -torch.inf)
        weights = torch.cat([scores, own[..., None]], -1).softmax(-1)
        rows = torch.einsum("htj,jhr->tr", weights[..., :-1], values)
        rows = rows + torch.einsum(
            "ht,thr->tr", weights[..., -1], self.values[tokens, place]
        )
        return squared_norms(rows)


def contexts_of(
    parts: Anatomy,
    inputs: FirstInputs,
    tokens: Tensor,
    count: int,
    directions: Tensor,
) -> Contexts:
    """Make the tables of tokens (t,) at the first `count` positions, along directions (d, r)."""
    query, key, value = parts.attention(1).apart
    rows = torch.stack([inputs.at(tokens, place) for place in range(count)], 1)

    def mapped(projection: Projection) -> Tensor:
        given = rows @ projection.weight.double().mT
        given = given if projection.bias is None else given + projection.bias.double()
        return given.unflatten(-1, (parts.heads, parts.head_dim))

    values = mapped(value)
    along = directions.double().unflatten(0, (parts.heads, parts.head_dim))
    scale = values.square().sum((-1, -2)).mean().sqrt()  # makes distances relative
    values = torch.einsum("tnhk,hkr->tnhr", values, along) / scale
    queries = mapped(query) / parts.head_dim**0.5
    return Contexts(queries.float(), mapped(key).float(), values.float())


# Where tokens stand, from the gradient's sums over each token and over each position.
#
# With x(v, p) = (ŵ_v + û_p)/s + b (span.py), the gradient G = Σ_(v,p) δ_vp x(v, p)ᵀ of
# the first maps is
#
#     G = Σ_v α_v ŵ_vᵀ + Σ_p β_p û_pᵀ + γ bᵀ,  α_v = Σ_p δ_vp / s(v, p),  β_p = Σ_v δ_vp / s(v, p).
#
# The ŵ of the batch's tokens, the û and b are linearly independent if there are fewer
# of them than the layer is wide, so least squares gives every α_v and β_p. All of the
# α_v of a token that occurs once is in one β_p, and the α of different tokens are
# independent as well. So regressing β_p on them gives a share near 1 where the token
# stands and near 0 at other positions; the share of a token that occurs several times
# is divided. This excludes the wrong pairs that the span of several texts admits.
#
# The same sums show which tokens are in one text. A value's gradient is Σ_i A_ij o_i in
# each head, with o_i the gradient of the head's output at position i of the same text
# and A_ij the attention: in every head the tokens of one text have nearly the same
# direction, because they share a loss. Cosines of the value map's α, head by head, are
# therefore near 1 within a text and near 0 between texts.


class Places(NamedTuple):
    """The share of each token (t,) at each position, `shares` (t, n).

    `directions` (t, h, k) are the unit vectors of its value's gradient in each head.
    """

    tokens: Tensor
    shares: Tensor
    directions: Tensor

    def resemblance(self, number: int) -> Tensor:
        """Return how much each token (t,) resembles the text of token `number`.

        This is the mean cosine over heads with the token's own direction, then with the
        mean direction of the few tokens that resemble it most, then of more of them. At
        most one token at each position counts, and only tokens that stand at one
        position.
        """
        most, at = self.shares.max(1)
        once = most > _WHOLE
        common = self.directions[number]
        for count in _GROWING:
            alike = torch.einsum("thk,hk->th", self.directions, common).mean(-1)
            ranked = alike.masked_fill(~once, -1.0).argsort(descending=True).tolist()
            nearest = dict[int, int]()  # the most similar token at each position
            for token in ranked[: int(once.sum())]:
                nearest.setdefault(int(at[token]), token)
            members = [number, *list(nearest.values())[:count]]
            common = normalized(self.directions[members].mean(0))
        return torch.einsum("thk,hk->th", self.directions, common).mean(-1)


Rows = tuple[
    Tensor, Tensor | None
]  # a gradient (m, d), or (m, r) and the map A (r, d) before it


def places_of(
    given: Sequence[Rows],
    values: Rows,
    heads: int,
    inputs: FirstInputs,
    tokens: Tensor,
    count: int,
) -> Places:
    """Find the shares of tokens at the first `count` positions, from the rows of gradients.

    `values` are the rows of the value map among them, `heads` one after the other.
    """
    if inputs.places is None:
        reason = "an encoder without embeddings of positions: gradients do not say where tokens are"
        raise not_applicable(reason)
    table = torch.cat(
        [inputs.words[tokens], inputs.places[:count], inputs.offset[None]]
    )

    def sums_of(rows: Tensor, through: Tensor | None) -> Tensor:
        known = table if through is None else table @ through.to(table).mT
        return torch.linalg.pinv(known.mT, rtol=_RANK) @ rows.mT

    sums = torch.cat([sums_of(*each) for each in given], 1)
    own = sums[: len(tokens)]
    at = sums[len(tokens) : len(tokens) + count]
    shares = torch.linalg.pinv(own.mT, rtol=_RANK) @ at.mT
    directions = sums_of(*values)[: len(tokens)].unflatten(-1, (heads, -1))
    return Places(tokens, shares, normalized(directions))
