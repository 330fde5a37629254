"""Order the vocabulary by how likely each token is at a position, from what leaked there.

A left-to-right search tries tokens until one fits (decoder.py). `fit` takes the model
and the kind of leak, and `Orderings.first` returns the tokens to try first for a leaked
row.

The attacker has the weights. Running each token alone through the first block gives a
table `z_v`, and running random texts through the model gives rows `h` as they would
leak. With these the attacker fits

    h = μ + A z_v + e,      e ~ N(0, C),

by ridge regression towards a diagonal matrix: the residual stream carries a token's
first state upwards, so `A` is nearly diagonal. Generalised cross-validation chooses its
strength. Tokens are tried in the order of their likelihood. Predicting the row from the
token needs far fewer random tokens than predicting the token from the row, because the
table holds the whole vocabulary.

- Keys and values are fitted in two steps, from `z` to the layer's input `x`, where the diagonal
  helps, and from `x` to the row, which is nearly linear.
- The first position has its own fit. No token comes before it, and most decoders use it as an
  attention sink, with states hundreds of times as large as at other positions.
- If rows leak before tokens attend to each other (embeddings, the cache of layer 0), the table
  holds these rows themselves, and `A = 1`.
- The model predicts the next token from the last hidden state. If that leaks, the row before a
  position gives this prediction, and `log p(v | h_{t−1})` is added to the likelihood.
- If the order misses, most of `e` is often what the prefix adds to the rows of all tokens: the mean
  of what is left of the rows tried at that position. It is then subtracted
  (`Orderings.context`).

Of rows with very many numbers (a large model's cache) only some numbers, evenly chosen,
decide on the order. The table and what it predicts are kept in the model's own
precision.

A fit depends on the exposure alone, and the leak's own error is added at the end. So a
fit is kept for the next leak of the same exposure, which may be the same text in
another precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError
from keyhole.core.tensors import indices_of, row_numbers, seeded
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import rows_of

# numbers of a row that decide on the order, at most; of longer rows half as many do
MANY = 4096
_STRENGTHS = torch.logspace(-5, 2, 15, dtype=torch.float64)
# of the errors' correlations: there are fewer random rows than pairs of numbers
_SHRINKAGE = 0.2
_LEAST_ERROR = 1e-3  # of a prediction, as a share of a number's spread
_LENGTH = 32  # tokens of a random text
_CHUNK = 4096  # rows of an array in memory at a time
_RANKED = 128  # rows ranked at a time: their distances to the whole table are in memory
# Errors are not quite Gaussian, and their covariance is an estimate, so the likelihood
# is overconfident. This power of it predicts unseen random tokens best (0.2 to 0.3 on
# SmolLM2).
_TRUST = 0.2
_SEEN = 128  # random rows that the order is tested on
_SINK = 25.0  # squared length of an attention sink, in medians
_UNPREDICTED = 0.1  # the share of tokens that the model's own prediction does not cover


class Fit(NamedTuple):
    """The regression at a position: μ (f,), predicted rows `A z_v` (v, c), error products (c, c).

    Only the `numbers` (c,) of a row are predicted. `spread` (f,) is how much each
    number varies over random tokens, the unit of differences. `seen` (m, f) are some of
    the random rows, and `meant` (m,) their tokens.
    """

    centre: Tensor
    numbers: Tensor
    predicted: Tensor
    errors: Tensor
    spread: Tensor
    seen: Tensor
    meant: Tensor

    def ordering(self, error: Tensor | float) -> Ordering:
        """Return the ordering for a leak whose own errors (f,) have this standard deviation."""
        if isinstance(error, Tensor):
            error = error[self.numbers]
        precision = _precision(self.errors, self.spread[self.numbers], error)
        precision = precision.to(self.centre)
        halves = [
            (part.to(precision) @ precision * part).sum(-1) / 2
            for part in self.predicted.split(_CHUNK)
        ]
        return Ordering(self, precision, torch.cat(halves))


class Ordering(NamedTuple):
    """A fit with `C⁻¹` (c, c) and `½ wᵀC⁻¹w` (v,) for predicted rows w, by a leak's own error."""

    fit: Fit
    precision: Tensor
    half_norms: Tensor

    def likelihood(self, rows: Tensor) -> Tensor:
        """Return every token's log-likelihood (n, v) for rows (n, f), up to a constant per row."""
        centred = (rows - self.fit.centre)[..., self.fit.numbers]
        # numbers that did not leak say nothing
        weighed = centred.nan_to_num(0.0) @ self.precision
        parts = self.fit.predicted.split(_CHUNK)
        scores = [weighed @ part.to(weighed).mT for part in parts]
        return torch.cat(scores, -1) - self.half_norms

    def reach(self, count: int) -> float:
        """Return the share of random rows whose tokens are among the first `count`."""
        scores = self.likelihood(self.fit.seen)
        before = scores > scores.gather(1, self.fit.meant[:, None])
        return float((before.sum(-1) < count).float().mean())


class Orderings(NamedTuple):
    """The orderings of the first position and of the others.

    `head` (v, f) predicts the next token from a row. `spent` counts the tokens run for
    the fit.
    """

    opening: Ordering
    rest: Ordering
    head: Tensor | None
    spent: int

    def at(self, position: int) -> Ordering:
        return self.rest if position else self.opening

    def spread(self, position: int) -> Tensor:
        fit = self.at(position).fit
        return fit.spread.to(fit.centre)

    def context(
        self,
        position: int,
        tokens: Tensor,
        given: Tensor,
    ) -> Tensor:
        """Return what a prefix adds (f,) to rows at a position, by rows (k, f) of tokens (k,)."""
        order = self.at(position).fit
        context = (given - order.centre).mean(0)
        context[order.numbers] -= order.predicted[tokens].to(context).mean(0)
        return context

    def first(
        self,
        rows: Tensor,
        positions: Tensor,
        count: int,
        context: Tensor | float = 0.0,
    ) -> Tensor:
        """Return the `count` tokens (m, count) to try first at `positions` (m,) of some rows."""
        count = min(count, len(self.rest.fit.predicted))
        best = [
            self._scores(rows, part, context).topk(count).indices
            for part in positions.split(_RANKED)
        ]
        return torch.cat(best)

    def _scores(
        self,
        rows: Tensor,
        positions: Tensor,
        context: Tensor | float,
    ) -> Tensor:
        own = rows[positions] - context
        scores = self.rest.likelihood(own)
        opening = positions == 0
        if opening.any():
            scores[opening] = self.opening.likelihood(own[opening])
        if self.head is None:
            return scores
        predicted = (rows[positions - 1] @ self.head.mT).softmax(-1)
        known = ~opening & predicted.isfinite().all(-1)
        covered = (1 - _UNPREDICTED) * predicted.nan_to_num(0.0)
        prior = covered + _UNPREDICTED / len(self.head)
        return _TRUST * scores + prior.log().where(known[:, None], 0.0)


def contents(
    target: Target,
    exposure: Exposure,
    tensors: Mapping[str, Tensor],
    positions: Tensor | None = None,
) -> Tensor:
    """Return leaked tensors as rows (b, n, f), with the rotation of keys undone.

    Keys were rotated by their `positions` (b, n), by default those from 0 on.
    """
    if exposure.kind != "kv":
        return rows_of(tensors)
    keys = tensors["keys"]
    if positions is None:
        places = torch.arange(keys.shape[-2], device=keys.device)
        positions = places.expand(len(keys), -1)
    unrotated = target.parts.unrotated(exposure.layer, keys, positions)
    return rows_of({**tensors, "keys": unrotated})


@torch.no_grad()
def fit(
    target: Target,
    exposure: Exposure,
    samples: int,
    seed: int,
    error: Tensor | float = 0.0,
) -> Orderings:
    """Return the orderings for a leak, from about `samples` random tokens and the vocabulary.

    `error` (f,) is the standard deviation of the leak's own error.
    """
    key = (exposure, samples, seed)
    *fits, spent = target.remembered("token order", key, lambda: _fits(target, *key))
    opening, rest = (part.ordering(error) for part in fits)
    return Orderings(opening, rest, _head(target, exposure), spent)


def _fits(
    target: Target,
    exposure: Exposure,
    samples: int,
    seed: int,
) -> tuple[Fit, Fit, int]:
    """Return the fits of the first position and of the others, and the tokens run for them."""
    stream = seeded(seed)
    alone = exposure.layer == 0  # embeddings or the first cache: no attention yet
    table = _table(target, exposure if alone else Exposure("hidden", 1))
    spent = target.vocabulary

    def fitted(
        count: int,
        length: int,
        first: int,
    ) -> Fit:
        """Fit the rows from position `first` on of some random texts."""
        nonlocal spent
        tokens = random_texts(target, count, length, stream)
        rows = _run(target, exposure, tokens)[:, first:].flatten(0, 1)
        spent += tokens.numel()
        inputs = None
        if exposure.kind == "kv" and not alone:
            below = Exposure("hidden", exposure.layer)
            inputs = _run(target, below, tokens)[:, first:].flatten(0, 1)
            spent += tokens.numel()
        return _regress(table, tokens[:, first:].flatten(), inputs, rows, alone)

    opening = fitted(samples // 2, 1, 0)
    rest = fitted(-(-samples // _LENGTH), _LENGTH, 1)
    return opening, rest, spent


def _head(target: Target, exposure: Exposure) -> Tensor | None:
    """Return the matrix from a last hidden state to scores of the next token, if that leaked.

    Rows of length one are taken to have been as long as those of random tokens usually
    are.
    """
    parts = target.parts
    last = Exposure("hidden", parts.layers)
    if exposure not in (last, replace(last, unit=True)):
        return None
    head = getattr(target.model, "get_output_embeddings", lambda: None)()
    if head is not None:
        weight = head.weight.detach().float()
    elif getattr(parts.base.config, "tie_word_embeddings", False):
        weight = target.table
    else:
        return None
    if not exposure.unit:
        return weight
    tokens = random_texts(target, 4, _LENGTH, seeded(0))
    return weight * _run(target, last, tokens).norm(dim=-1).median()


def _table(target: Target, exposure: Exposure) -> Tensor:
    """Return `z_v` (v, e) of each token alone; remembered for the fits of other layers."""

    def run() -> Tensor:
        rows = _run(target, exposure, target.tokens[:, None])[:, 0]
        return rows.to(target.parts.tokens.weight.dtype)

    return target.remembered("tokens alone", exposure, run)


def _run(
    target: Target,
    exposure: Exposure,
    ids: Tensor,
) -> Tensor:
    """Return the rows (b, n, f) of texts (b, n)."""
    batches = target.exposed(exposure, ids)
    return torch.cat([contents(target, exposure, given) for given in batches])


class _Rows(NamedTuple):
    """The rows `chosen` (n,) of an array, less their mean, in float64.

    They are computed in chunks: the arrays are as large as a part of the model.
    """

    array: Tensor
    chosen: Tensor
    mean: Tensor

    @classmethod
    def of(cls, array: Tensor, chosen: Tensor) -> _Rows:
        total = sum(array[some].double().sum(0) for some in chosen.split(_CHUNK))
        return cls(array, chosen, cast("Tensor", total) / len(chosen))

    def chunks(self) -> Iterator[Tensor]:
        return (
            self.array[some].double() - self.mean for some in self.chosen.split(_CHUNK)
        )

    def times(self, other: _Rows) -> Tensor:
        """Return the sum of the outer products of both rows, (f, g)."""
        pairs = zip(self.chunks(), other.chunks(), strict=True)
        return cast("Tensor", sum(mine.mT @ others for mine, others in pairs))


def _regress(
    table: Tensor,
    tokens: Tensor,
    inputs: Tensor | None,
    rows: Tensor,
    alone: bool,
) -> Fit:
    """Fit `A`, `μ` and the errors to rows (n, f) of tokens (n,) of the table.

    With `inputs` of the layer, the fit takes two steps. With `alone`, `A = 1`.
    """
    size = rows.square().mean(-1)
    # A few random tokens become attention sinks too.
    kept = indices_of(size <= _SINK * size.median())
    if not len(kept):
        raise LinAlgError("the model's answers to random texts are not finite")
    count = len(kept)
    width = rows.shape[-1]
    chosen = width if alone or width <= MANY else MANY // 2
    numbers = torch.arange(chosen, device=rows.device) * width // chosen
    whole = _Rows.of(rows, kept)
    squares = cast("Tensor", sum(part.square().sum(0) for part in whole.chunks()))
    spread = (squares / max(count - 1, 1)).sqrt().clamp(min=1e-9)
    squares = squares[numbers]
    x = _Rows.of(table, tokens[kept])
    y = _Rows.of(rows[:, numbers], kept) if chosen < width else whole
    freedom = 0.0
    if alone:
        matrix = torch.eye(len(x.mean), dtype=torch.float64, device=rows.device)
    elif inputs is None:
        matrix, freedom = ridge(x.times(x), x.times(y), squares, count)
    else:
        layer_input = _Rows.of(inputs, kept)
        own = layer_input.times(layer_input)
        matrix, freedom = ridge(x.times(x), x.times(layer_input), own.diagonal(), count)
        matrix = matrix @ ridge(own, layer_input.times(y), squares, count)[0]
    off = (b - a @ matrix for a, b in zip(x.chunks(), y.chunks(), strict=True))
    errors = cast("Tensor", sum(part.mT @ part for part in off)) / count
    errors = errors / max(1 - freedom / count, 0.1) ** 2
    every = row_numbers(table)
    predicted = table.new_empty(len(table), chosen)
    chunks = _Rows(table, every, x.mean).chunks()
    for some, part in zip(every.split(_CHUNK), chunks, strict=True):
        predicted[some] = (part @ matrix).to(table)
    some = kept[:_SEEN]
    return Fit(
        whole.mean.to(rows),
        numbers,
        predicted,
        errors,
        spread,
        rows[some],
        tokens[some],
    )


def ridge(
    xx: Tensor,
    xy: Tensor,
    yy: Tensor,
    count: int,
) -> tuple[Tensor, float]:
    """Return `A` with `y ≈ x A`, close to diagonal if it is square, and its degrees of freedom.

    The sums over `count` centred rows x and y are `xx = xᵀx`, `xy = xᵀy` and the
    squares `yy` (g,). Generalised cross-validation chooses among 15 strengths from 1e-5
    to 100, relative to the number of rows and to the variance of each column of x.
    """
    own = xx.diagonal()
    scale = (own / max(count - 1, 1)).sqrt().clamp(min=1e-12)
    square = len(xx) == len(yy)
    diagonal = xy.diagonal() / own.clamp(min=1e-12) if square else torch.zeros_like(yy)
    # of y − x D: the products with x, and the sums of squares
    rest = xy
    left = yy
    if square:
        rest = xy - xx * diagonal
        left = yy - 2 * diagonal * xy.diagonal() + diagonal.square() * own
        left = left.clamp(min=0)
    values, vectors = torch.linalg.eigh(xx / scale / scale[:, None])
    values = values.clamp(min=0)
    weights = vectors.mT @ (rest / scale[:, None])
    unit = (left / max(count - 1, 1)).clamp(min=1e-24)
    squares = (weights.square() / unit).sum(-1)
    total = (left / unit).sum()
    best = (float("inf"), 0.0, 0.0)
    for strength in (_STRENGTHS * count).tolist():
        shrunk = values + strength
        freedom = float((values / shrunk).sum())
        # ‖remainder − X V (Λ + s)⁻¹ w‖² with VᵀXᵀX V = Λ and w = VᵀXᵀ remainder,
        # without X.
        gain = (2 - values / shrunk) / shrunk
        loss = float(total - (gain * squares).sum()) / (count * len(yy))
        loss = max(loss, 0.0) / max(1 - freedom / count, 0.05) ** 2
        if loss < best[0]:
            best = (loss, strength, freedom)
    _, strength, freedom = best
    found = vectors @ (weights / (values + strength)[:, None]) / scale[:, None]
    if square:
        found = found + diagonal.diag()
    return found, freedom


def _precision(
    errors: Tensor,
    unit: Tensor,
    error: Tensor | float,
) -> Tensor:
    """Return the inverse covariance of errors with mean products (f, f).

    Correlations are shrunk, and the leak's own error is added.
    """
    spread = errors.diagonal().sqrt().clamp(min=_LEAST_ERROR * unit)
    scale = spread * spread[:, None]
    own = (1 - _SHRINKAGE) * errors / scale
    inverse = torch.linalg.inv(own + (_SHRINKAGE + (error / spread).square()).diag())
    return inverse / scale
