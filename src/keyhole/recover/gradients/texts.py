"""The texts of an encoder's batch, one by one, by a search that later spans judge.

Which tokens stand together in a text does not show in what the first attention receives. What it
gives for a text lies in the span of its output map's gradient at every position if all tokens of
the text are right. So a text starts from one token whose place is clear, and from those at the
other positions that resemble it by their gradients (`Places`); least squares over all tokens at all
positions put right what is wrong (`Contexts`), and where they do not, tokens are changed one by one
for what is nearest to the span. A text is read once what the second attention receives lies in the
span of that one's gradient, too. What texts that are read had of a token is no longer looked for.

DAGER combines all tokens that may stand at each position, which grows with the power of a text's
length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.models.anatomy import Anatomy, Projection
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.gradients.span import FirstInputs, Span, second_inputs

_WON = 0.999  # of the misfit: a sweep that leaves more is the last
_NEAR = 5e-3  # the misfit from which on what is clear may change as well
_CLEAR = 0.7  # of a token's share: it stands there
_OFF = 0.15  # that a share may differ from 1 and be clear
_ELSEWHERE = 0.35  # the largest share of a clear token at another position
_RIDGE = 1e-3  # of the mean square: how much a prior weighs
_ROWS = 16  # that masses are taken from
_RELIABLE = 0.3  # of a token's mass: its row says something
_KEPT = 24  # tokens that may stand at a position after the first step
_ENDS = 3  # tried at each step
_ALIKE = 0.65  # how much a token resembles a text's others, at least
_RANK = 1e-9  # of the largest singular value: what counts as dependent
_WHOLE = 0.8  # of a token's share: it stands there, and nowhere else
_GROWING = (3, 6, 10)  # tokens of a text that its direction is taken from, step by step
_STARTS = 6  # that fail for each text before the search ends,
_STEPS = 8  # … each after so many of least squares,
_SWEEPS = 8  # … and, where those do not do, sweeps over its tokens,
_FEW = 32  # … of which so many are tried at a position first


@dataclass(frozen=True, eq=False)
class Read:
    """A text's ids, whether all its rows lie in the span, and how far off they are."""

    ids: list[int]
    fits: bool
    misfit: float


@dataclass(eq=False)
class EncoderTexts:
    """What is known of a batch: tokens that may stand at each position, their places, and how texts
    of them are compared with the gradient. `span` is that of the second attention's inputs."""

    target: Target
    span: Span
    contexts: Contexts
    tokens: Sequence[Tensor]
    places: Places
    texts: int

    def __post_init__(self) -> None:
        known, count = self.places.tokens, len(self.tokens)
        self._exact = self.span.tolerance**2  # the misfit of a text that is right
        self._numbers = {int(id_): number for number, id_ in enumerate(known)}
        before, after = self.target.frame()
        self._before = [self._numbers[id_] for id_ in before if id_ in self._numbers]
        self._after = [self._numbers[id_] for id_ in after if id_ in self._numbers]
        self._may = torch.stack([torch.isin(known, tokens) for tokens in self.tokens], 1)
        self._ends = [
            place
            for place in range(len(before), count - len(self._after) + 1)
            if all(self._may[id_, place + off] for off, id_ in enumerate(self._after))
        ]
        self._closing = torch.zeros_like(self._may)
        for id_ in self._after[:1]:
            self._closing[id_, self._ends] = True
        special = torch.tensor([*before, *after, *self.target.pads()], device=known.device)
        self._may &= ~torch.isin(known, special)[:, None]
        order = self.places.shares.argsort(0, descending=True)
        self._likeliest = [
            order[:, at][self._may[order[:, at], at]] for at in range(len(self.tokens))
        ]
        # Shares that no text explains yet: where texts start, and what they start with.
        self._left = self.places.shares.clamp(min=0) * self._may

    def __iter__(self) -> Iterator[Read]:
        """Each text once; those that do not fit come last, the nearest ones first."""
        read: set[tuple[int, ...]] = set()
        others: dict[tuple[int, ...], Read] = {}
        # Texts that are easy to read clear up the others; where all seem to fit, none is easy.
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
        """Tokens whose places are clear and in no text that is read, the clearest first."""
        tried = torch.zeros_like(self._left, dtype=torch.bool)
        while True:
            clear = (1 - (1 - self._left).abs()).masked_fill(tried, 0)  # a share of 1: all of it
            number, place = divmod(int(clear.argmax()), clear.shape[1])
            if float(clear[number, place]) <= 0:
                return
            tried[number, place] = True
            yield number, place

    def _read(self, number: int, place: int, sweeps: int) -> Read:
        """The nearest text to the span that begins its search with a token at a place."""
        text, misfit, clear = self._solved(number, place)
        if sweeps and not (misfit < self._exact and self.span.sharp):  # else others reach that, too
            text, misfit = self._swept(text, misfit, clear)
        ids = self.places.tokens[text].tolist()
        read = Read(ids, misfit < math.inf and self._fits(ids), misfit)
        if read.fits:
            for at, each in enumerate(text.tolist()):
                whole = self.places.shares[each, at] > _CLEAR  # then it stands nowhere else
                self._left[each, slice(None) if whole else at] = 0
        return read

    def _guess(self, number: int, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """How likely (t, n) tokens stand in the start's text, at each position the likeliest one,
        and where (n,) that is clear: all of it stands there, and none of it elsewhere."""
        alike = self.places.resemblance(number)[:, None].clamp(min=0)
        prior = self._left * alike.square()
        guess = (prior + self._may * 1e-9).argmax(0)
        guess[place] = number
        guess[: len(self._before)] = torch.tensor(self._before, device=guess.device)
        at = torch.arange(len(guess), device=guess.device)
        elsewhere = self._left[guess].masked_fill(at[:, None] == at, 0).amax(1)
        off = (1 - self._left[guess, at]).abs()
        clear = (off < _OFF) & (elsewhere < _ELSEWHERE) & (alike[guess, 0] > _ALIKE)
        clear[place] = True
        clear[: len(self._before)] = True
        return prior.clamp(max=1), guess, clear

    def _solved(self, number: int, place: int) -> tuple[Tensor, float, Tensor]:
        """The best text that `Contexts.masses` lead to, its misfit, and what was clear before."""
        prior, guess, clear = self._guess(number, place)
        last, fixed = int(clear.nonzero().max()), len(self._before)
        may = self._may | self._closing
        text, misfit = self._ended(guess, [end for end in self._ends if end > last])
        weights = clear[: len(text)].float()
        best, seen = (text, misfit), set[tuple[int, ...]]()
        while not misfit < self._exact and tuple(text.tolist()) not in seen:
            seen.add(tuple(text.tolist()))
            rows = weights.argsort(descending=True, stable=True)[:_ROWS]
            rows = rows[weights[rows] > _RELIABLE]
            masses = self.contexts.masses(text, rows, weights[rows], fixed, may, prior)
            least = masses.masked_fill(~may, -math.inf).topk(min(_KEPT, len(may)), 0).values[-1]
            may &= (masses >= least) | self._closing
            guess = masses.masked_fill(~self._may, -math.inf).argmax(0)
            guess[place], guess[:fixed] = number, text[:fixed]
            text, misfit = self._ended(guess, self._likely_ends(masses, place))
            weights = masses[text, torch.arange(len(text), device=text.device)].clamp(0, 1)
            weights[:fixed] = weights[place] = 1
            best = min(best, (text, misfit), key=lambda each: each[1])
            if len(seen) == _STEPS:
                break
        return *best, clear

    def _likely_ends(self, masses: Tensor, place: int) -> list[int]:
        """Ends behind a place, those first where the closing token has most mass."""
        most = torch.cat([masses.amax(0), torch.zeros(1).to(masses)])
        mass = masses[self._after[0]] if self._after else most.roll(1) - most
        ends = [end for end in self._ends if end > place]
        return sorted(ends, key=lambda end: -float(mass[end]))[:_ENDS]

    def _ended(self, guess: Tensor, ends: Sequence[int]) -> tuple[Tensor, float]:
        """The nearest text to the span that ends at one of some positions."""
        after = torch.tensor(self._after, device=guess.device).long()
        texts = [torch.cat([guess[:end], after]) for end in ends]
        misfits = [float(self.contexts.misfit(text)) for text in texts]
        if not texts:
            return guess, math.inf
        best = min(range(len(texts)), key=misfits.__getitem__)
        return texts[best], misfits[best]

    def _swept(self, text: Tensor, misfit: float, clear: Tensor) -> tuple[Tensor, float]:
        """One token after the other changed for the better, first where none is clear."""
        inside = self._inside(text)
        free, few = [at for at in inside if not clear[at]], _FEW
        for _ in range(_SWEEPS):
            before = misfit
            for at in free:
                best, reached = self._best(text, at, few)
                if reached < misfit:
                    text, misfit = _with(text, at, best), reached
            if misfit < self._exact:
                break
            if misfit > _WON * before:
                if few == len(self._may) or misfit > _NEAR:
                    break
                free, few = inside, len(self._may)
        return text, misfit

    def _inside(self, text: Tensor) -> list[int]:
        """The positions between the special tokens."""
        return list(range(len(self._before), len(text) - len(self._after)))

    def _best(self, text: Tensor, at: int, few: int) -> tuple[int, float]:
        """Of the `few` likeliest tokens at a position the one that fits best, and its misfit."""
        numbers = self._likeliest[at][:few]
        if not len(numbers):
            return int(text[at]), math.inf
        misfits = self.contexts.changed(text, at, numbers)
        best = int(misfits.argmin())
        return int(numbers[best]), float(misfits[best])

    def _fits(self, ids: list[int]) -> bool:
        """Does every row that the second attention would receive lie in its span?"""
        given = torch.tensor([ids], device=self.target.parts.device)
        with torch.no_grad():
            states = capture(self.target.model, Exposure("hidden", 1), ids=given)["values"]
            far = self.span.distance(second_inputs(self.target.parts, states)[0])
        return bool((far <= self.span.tolerance).all())


def _with(text: Tensor, place: int, number: int) -> Tensor:
    """The text with another token at a place."""
    changed = text.clone()
    changed[place] = number
    return changed


# What the first attention gives for a text, and for all texts one token away from it.
#
# At position i head h gives c_i = Σ_j e_ij v_j / Σ_j e_ij with e_ij = exp(q_i·k_j/√k), and the
# heads side by side are the input of the attention's output map. A text of the batch has its c_i in
# the span of that map's gradient, so only their products with directions R of the span's complement
# matter: v_j R takes the place of v_j. A token that changes at one position takes one term out of
# both sums and puts another in, at all other positions: a thousand times cheaper than the layer.
#
# All tokens of a text are found at once by least squares. With a mass z_vp of every token at every
# position, Σ_j runs over all pairs (v, p), and near a text c_i is linear in z:
#
#     c_i(z) R = c_i R + Σ_vp z_vp e_i,vp (v_vp − c_i) R / Σ_j e_ij.
#
# A row whose own token is right gives an equation c_i(z) R = 0 for each direction, and a few such
# rows more than there are tokens in the text. The heaviest token at each position makes the next
# text, their masses say which of its rows to trust, and light tokens are dropped.


@dataclass(frozen=True, eq=False)
class Contexts:
    """Queries and keys (t, n, h, k) of tokens at positions, and products (t, n, h, r) of their
    values with directions; a text is the numbers (n,) of its tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def misfit(self, text: Tensor) -> Tensor:
        """The mean squared distance of a text's rows from the span."""
        queries, keys, values = self._of(text)
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        rows = torch.einsum("hij,jhr->ir", scores.softmax(-1), values)
        return rows.square().sum(-1).mean()

    def _of(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(len(text), device=text.device)
        return self.queries[text, places], self.keys[text, places], self.values[text, places]

    def masses(
        self, text: Tensor, rows: Tensor, weights: Tensor, fixed: int, may: Tensor, prior: Tensor
    ) -> Tensor:
        """How much (t, n) of each token that `may` stand at a position does, from some rows.

        Ridge regression towards `prior`, near a text whose first `fixed` tokens are known.
        """
        queries, keys, values = self._of(text)
        queries = queries[rows]
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        total = scores.logsumexp(-1, keepdim=True)
        own = torch.einsum("hij,jhr->ihr", scores.softmax(-1), values)

        def columns(tokens: Tensor, places: Tensor) -> Tensor:
            share = torch.einsum("ihk,chk->hic", queries, self.keys[tokens, places]) - total
            share = share.clamp(max=0).exp()
            given = torch.einsum("hic,chr->irc", share, self.values[tokens, places])
            given -= torch.einsum("hic,ihr->irc", share, own)
            return (given * weights[:, None, None]).flatten(0, 1)

        tokens, places = may.nonzero().unbind(1)
        given, before = columns(tokens, places), prior[tokens, places].to(values)
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

    def changed(self, text: Tensor, place: int, tokens: Tensor) -> Tensor:
        """The same (c,) of the text with each of some tokens in turn at one position."""
        queries, keys, values = self._of(text)
        others = torch.arange(len(text), device=text.device) != place
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp() * others
        total = weights.sum(-1, keepdim=True)  # (h, i, 1), without the position that changes
        rows = torch.einsum("hij,jhr->hir", weights, values)
        own = torch.einsum("ihk,thk->hit", queries, self.keys[tokens, place])
        new_values = self.values[tokens, place]
        own = (own - highest).exp()
        # rows: (h, i, t, r) summed over heads, without ever holding all heads at once.
        given = torch.zeros(len(text), len(tokens), values.shape[-1]).to(values)
        for head in range(values.shape[1]):
            new = rows[head][:, None] + own[head][..., None] * new_values[:, head]
            given += new / (total[head] + own[head])[..., None]
        far = (given.square().sum(-1) * others[:, None]).sum(0)
        return (far + self._own_rows(tokens, place, keys, values, others)) / len(text)

    def _own_rows(
        self, tokens: Tensor, place: int, keys: Tensor, values: Tensor, others: Tensor
    ) -> Tensor:
        """Squared distances (c,) of the row at the position that changes itself."""
        queries = self.queries[tokens, place]
        scores = torch.einsum("thk,jhk->htj", queries, keys)
        own = torch.einsum("thk,thk->ht", queries, self.keys[tokens, place])
        scores = scores.masked_fill(~others, -torch.inf)
        weights = torch.cat([scores, own[..., None]], -1).softmax(-1)
        rows = torch.einsum("htj,jhr->tr", weights[..., :-1], values)
        rows = rows + torch.einsum("ht,thr->tr", weights[..., -1], self.values[tokens, place])
        return rows.square().sum(-1)


def contexts_of(
    parts: Anatomy, inputs: FirstInputs, tokens: Tensor, count: int, directions: Tensor
) -> Contexts:
    """The tables of tokens (t,) at the first `count` positions, along directions (d, r)."""
    query, key, value = parts.attention(1).apart
    rows = torch.stack([inputs.at(tokens, place) for place in range(count)], 1)

    def mapped(projection: Projection) -> Tensor:
        given = rows @ projection.weight.double().mT
        given = given if projection.bias is None else given + projection.bias.double()
        return given.unflatten(-1, (parts.heads, parts.head_dim))

    values = mapped(value)
    along = directions.double().unflatten(0, (parts.heads, parts.head_dim))
    scale = values.square().sum((-1, -2)).mean().sqrt()  # so that distances are relative ones
    values = torch.einsum("tnhk,hkr->tnhr", values, along) / scale
    queries = mapped(query) / parts.head_dim**0.5
    return Contexts(queries.float(), mapped(key).float(), values.float())


# Where tokens stand: the gradient's sums over each token and over each position.
#
# With x(v, p) = (ŵ_v + û_p)/s + b (span.py), the gradient G = Σ_(v,p) δ_vp x(v, p)ᵀ of the first
# maps is
#
#     G = Σ_v α_v ŵ_vᵀ + Σ_p β_p û_pᵀ + γ bᵀ,  α_v = Σ_p δ_vp / s(v, p),  β_p = Σ_v δ_vp / s(v, p).
#
# The ŵ of the batch's tokens, the û and b are linearly independent where there are fewer of them
# than the layer is wide, so least squares gives every α_v and β_p. A token that occurs once has all
# of its α_v in one β_p, and the α of different tokens are independent as well, so regressing β_p on
# them gives a share near 1 where it stands and near 0 elsewhere; a token that occurs several times
# has parts. So the pairs that the span of several texts admits besides the true ones are told
# apart.
#
# The same sums say which tokens stand together. A value's gradient is Σ_i A_ij o_i in each head,
# with o_i the gradient of the head's output at position i of the same text and A_ij the attention:
# in every head the tokens of one text share a direction nearly, because one loss made them. Cosines
# of the value map's α, head by head, are therefore near 1 within a text and near 0 between texts.


@dataclass(frozen=True, eq=False)
class Places:
    """Of tokens (t,): how much of each stands at each position, `shares` (t, n).

    `directions` (t, h, k) are those of the value's gradient in each head, of length one.
    """

    tokens: Tensor
    shares: Tensor
    directions: Tensor

    def resemblance(self, number: int) -> Tensor:
        """How much each token (t,) resembles those that stand in one text with token `number`.

        The mean cosine over heads with the token's own direction, then with the common one of the
        few that resemble it most, then of more of them: at most one of those at each position, and
        only such as stand at one position alone.
        """
        most, at = self.shares.max(1)
        once = most > _WHOLE
        common = self.directions[number]
        for count in _GROWING:
            alike = torch.einsum("thk,hk->th", self.directions, common).mean(-1)
            ranked = alike.masked_fill(~once, -1.0).argsort(descending=True).tolist()
            nearest = dict[int, int]()  # the token most like it at each position
            for token in ranked[: int(once.sum())]:
                nearest.setdefault(int(at[token]), token)
            members = [number, *list(nearest.values())[:count]]
            common = normalize(self.directions[members].mean(0), dim=-1)
        return torch.einsum("thk,hk->th", self.directions, common).mean(-1)


Rows = tuple[Tensor, Tensor | None]  # of a gradient (m, d), or (m, r) after a map A (r, d)


def places_of(
    given: Sequence[Rows],
    values: Rows,
    heads: int,
    inputs: FirstInputs,
    tokens: Tensor,
    count: int,
) -> Places:
    """What the gradient's rows say of tokens at the first `count` positions.

    `values` are the rows of the value map among them, those of `heads` one after the other.
    """
    if inputs.places is None:
        reason = "an encoder without embeddings of positions: gradients do not say where tokens are"
        raise Unsuccessful(Status.NOT_APPLICABLE, reason)
    table = torch.cat([inputs.words[tokens], inputs.places[:count], inputs.offset[None]])

    def sums_of(rows: Tensor, through: Tensor | None) -> Tensor:
        known = table if through is None else table @ through.to(table).mT
        return torch.linalg.pinv(known.mT, rtol=_RANK) @ rows.mT

    sums = torch.cat([sums_of(*each) for each in given], 1)
    own, at = sums[: len(tokens)], sums[len(tokens) : len(tokens) + count]
    shares = torch.linalg.pinv(own.mT, rtol=_RANK) @ at.mT
    each = sums_of(*values)[: len(tokens)].unflatten(-1, (heads, -1))
    unit = normalize(each, dim=-1)
    return Places(tokens, shares, unit)


# The texts of a causal model's batch, left to right: prefixes that the second span admits.
#
# What the second attention receives at position t depends on the tokens up to t alone, so a prefix
# lies in the span of its gradient exactly if some text of the batch begins with it (DAGER, arXiv
# 2405.15586). All prefixes are extended side by side by all tokens of the batch; the prefix's keys
# and values are kept (models/branches.py), so a token tried costs a token's pass through one block.
# A prefix that no token extends is a text.
#
# A model with rotary positions gives the same row for a token behind itself as for the token alone,
# because attention over equal values is that value. Such a token is no evidence: it stays only if
# something else follows it, after a few at most.

_SAME = 1e-4  # of a row's length: rows nearer than this are one and the same
_MORE = 2  # times the texts of a batch: prefixes that are followed
_REPEATED = 4  # times that a text's first token may follow itself
_OUT = 6.0  # median deviations from the median that a distance stands out by


@dataclass(frozen=True, eq=False)
class _Prefix:
    """Ids, how many of them are proven by a row of their own, and the row at the end."""

    ids: tuple[int, ...]
    proven: int
    row: Tensor | None


@dataclass(eq=False)
class DecoderTexts:
    """`tokens` may stand at each position, or, where there is one entry alone, at all of them.

    Where errors or a low rank blur the span, the next tokens are those `standing_out` from the
    others by their distance.
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
        branches = Branches(self.target.model, torch.zeros(1, dtype=torch.long, device=device))
        active = [_Prefix((), 0, None)]
        ended: list[_Prefix] = []
        for place in range(self.max_length):
            # A model without embeddings of positions has the same tokens everywhere.
            tokens = self.tokens[min(place, len(self.tokens) - 1)]
            if len(self.tokens) > 1 and place >= len(self.tokens):
                ended += active
                break
            longer = self._longer(branches, active, tokens)
            going = {parent for parent, _, _ in longer}
            ended += [prefix for number, prefix in enumerate(active) if number not in going]
            if not longer:
                break
            parents = torch.tensor([parent for parent, _, _ in longer], device=device)
            first = torch.tensor([node for _, node, _ in longer], device=device)
            branches.accept(first, torch.ones_like(first), parents)
            active = [prefix for _, _, prefix in longer]
        else:
            ended += active
        yield from _distinct(ended)

    def _longer(
        self, branches: Branches, active: Sequence[_Prefix], tokens: Tensor
    ) -> list[tuple[int, int, _Prefix]]:
        """(prefix, node, longer prefix) of those in the span, the nearest ones first."""
        chain = torch.zeros(len(active), dtype=torch.bool, device=tokens.device)
        ids = tokens.expand(len(active), -1)
        states = branches.expose(Exposure("hidden", 1), chain, ids=ids)["values"]
        rows = second_inputs(self.target.parts, states)  # (b, c, d)
        far = self.span.distance(rows)
        most = self.span.tolerance
        if self.standing_out:
            middle = far.median()
            most = float(middle - _OUT * (far - middle).abs().median())
        inside = (far <= most).nonzero()
        near: list[list[int]] = inside[far[inside[:, 0], inside[:, 1]].argsort()].tolist()
        longer: list[tuple[int, int, _Prefix]] = []
        for parent, node in near[: _MORE * self.texts]:
            prefix, row = active[parent], rows[parent, node]
            ids = (*prefix.ids, int(tokens[node]))
            same = prefix.row is not None and bool((row - prefix.row).norm() <= _SAME * row.norm())
            proven = prefix.proven if same else len(ids)
            if len(ids) - proven > _REPEATED:
                continue
            longer.append((parent, node, _Prefix(ids, proven, row)))
        return longer


def _distinct(ended: Sequence[_Prefix]) -> Iterator[list[int]]:
    """The proven part of each text, longest first, unless another one begins with it."""
    texts = sorted({prefix.ids[: prefix.proven] for prefix in ended}, key=len, reverse=True)
    kept: list[tuple[int, ...]] = []
    for text in texts:
        if text and not any(longer[: len(text)] == text for longer in kept):
            kept.append(text)
            yield list(text)
