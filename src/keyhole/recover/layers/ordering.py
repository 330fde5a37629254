"""The order in which tokens are tried at a position, from what leaked there.

The attacker has the weights. Running each token alone through the first block gives a table `z_v`,
and running random texts through the model gives rows `h` as they would leak. With these the
attacker fits

    h = μ + A z_v + e,      e ~ N(0, C),

by ridge regression towards a diagonal matrix (the residual stream carries a token's first state
upwards, so `A` is nearly diagonal), its strength chosen by generalised cross-validation. Tokens are
tried in the order of their likelihood. Predicting the row from the token needs far fewer random
tokens than predicting the token from the row, because the table holds the whole vocabulary.

- Keys and values are fitted in two steps, `z → x` and from the layer's input `x` to the row, which
  is nearly linear: the diagonal helps in the first.
- The first position has its own fit: no token comes before it, and most decoders use it as an
  attention sink, with states hundreds of times as large as at other positions.
- Where rows leak before tokens attend to each other (embeddings, the cache of layer 0), the table
  holds these rows themselves, and `A = 1`.
- The last hidden state is what the model predicts the next token from. Where it leaks, the row
  before a position gives that prediction, and `log p(v | h_{t−1})` is added to the likelihood.

The fit depends on the exposure alone, and the leak's own error is added at the end. So a fit is
kept for the next leak of the same exposure, which may be the same text in another precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.leaks import rows_of

_STRENGTHS = torch.logspace(-5, 2, 15, dtype=torch.float64)
_SHRINKAGE = 0.2  # of the errors' correlations: there are fewer random rows than pairs of numbers
_LEAST_ERROR = 1e-3  # of a number's spread: no prediction is taken to be better
_LENGTH = 32  # tokens of a random text
_CHUNK = 4096  # tokens of the table, or of random texts, in one pass
_ROWS = 128  # rows ranked at a time: their distances to the whole table are held at once
# Errors are not quite Gaussian, and their covariance is an estimate: as it stands the likelihood is
# too sure of itself. This power of it predicts unseen random tokens best (0.2 to 0.3 on SmolLM2).
_TRUST = 0.2
_SEEN = 128  # random rows by which the order is put to the test
_UNPREDICTED = 0.1  # share of tokens that the model's own prediction does not cover


@dataclass(frozen=True, eq=False)
class Fit:
    """`μ`, the predicted rows `w_v`, the errors (n, f) of the fit, and each number's `spread`.

    `seen` (m, f) are some of the random rows, and `meant` (m,) their tokens.
    """

    centre: Tensor
    predicted: Tensor
    errors: Tensor
    spread: Tensor
    seen: Tensor
    meant: Tensor

    def ordering(self, error: Tensor | float) -> Ordering:
        """The ordering for a leak whose own errors (f,) have this standard deviation."""
        table = self.predicted
        precision = _precision(self.errors, self.spread, error).to(table)
        half_norms = (table @ precision * table).sum(-1) / 2
        return Ordering(
            self.centre, table, precision, half_norms, self.spread.to(table), self.seen, self.meant
        )


@dataclass(frozen=True, eq=False)
class Fits:
    """The fits of the first position and of all others; `spent` tokens were run for them."""

    opening: Fit
    rest: Fit
    spent: int


@dataclass(frozen=True, eq=False)
class Ordering:
    """`μ` (f,), the predicted rows `w_v = A z_v` (v, f), `C⁻¹` (f, f) and `½ wᵀC⁻¹w` (v,).

    `spread` (f,) is how much each number varies over random tokens: the unit of differences.
    """

    centre: Tensor
    predicted: Tensor
    precision: Tensor
    half_norms: Tensor
    spread: Tensor
    seen: Tensor
    meant: Tensor

    def likelihood(self, rows: Tensor) -> Tensor:
        """For rows (n, f) every token's log-likelihood (n, v), up to a constant for each row."""
        centred = (rows - self.centre).nan_to_num(0.0)  # what did not leak says nothing
        return centred @ self.precision @ self.predicted.mT - self.half_norms

    def reach(self, count: int) -> float:
        """The share of random rows whose tokens are among the first `count`."""
        scores = self.likelihood(self.seen)
        before = scores > scores.gather(1, self.meant[:, None])
        return float((before.sum(-1) < count).float().mean())


@dataclass(frozen=True, eq=False)
class Orderings:
    """The orderings of the first position and of the others; `head` (v, f) predicts from a row.

    `spent` counts the tokens that were run for the fit.
    """

    opening: Ordering
    rest: Ordering
    head: Tensor | None
    spent: int

    def at(self, position: int) -> Ordering:
        return self.rest if position else self.opening

    def spread(self, position: int) -> Tensor:
        return self.at(position).spread

    def first(self, rows: Tensor, positions: Tensor, count: int) -> Tensor:
        """The `count` tokens (m, count) to try first at `positions` (m,) of a text's rows."""
        count = min(count, len(self.rest.predicted))
        return torch.cat([
            self._scores(rows, part).topk(count).indices for part in positions.split(_ROWS)
        ])  # fmt: skip

    def _scores(self, rows: Tensor, positions: Tensor) -> Tensor:
        scores = self.rest.likelihood(rows[positions])
        opening = positions == 0
        if bool(opening.any()):
            scores[opening] = self.opening.likelihood(rows[positions[opening]])
        if self.head is None:
            return scores
        predicted = (rows[positions - 1] @ self.head.mT).softmax(-1)
        known = ~opening & predicted.isfinite().all(-1)
        prior = (1 - _UNPREDICTED) * predicted.nan_to_num(0.0) + _UNPREDICTED / len(self.head)
        return _TRUST * scores + prior.log().where(known[:, None], torch.zeros_like(prior))


def contents(
    target: Target, exposure: Exposure, tensors: dict[str, Tensor], positions: Tensor
) -> Tensor:
    """What leaked as rows (b, n, f) for tokens at `positions` (b, n), rotary positions undone."""
    if exposure.kind == "kv":
        keys = target.parts.unrotated(exposure.layer, tensors["keys"], positions)
        tensors = {**tensors, "keys": keys}
    return rows_of(tensors)


@torch.no_grad()
def fit(
    target: Target, exposure: Exposure, samples: int, seed: int, error: Tensor | float = 0.0
) -> Orderings:
    """The orderings for a leak, from about `samples` random tokens and the vocabulary.

    `error` (f,) is the standard deviation of the leak's own error where it is known.
    """
    key = (exposure, samples, seed)
    fits = target.remembered("token order", key, lambda: _fits(target, *key))
    orders = [part.ordering(error) for part in (fits.opening, fits.rest)]
    return Orderings(orders[0], orders[1], _head(target, exposure), fits.spent)


def _fits(target: Target, exposure: Exposure, samples: int, seed: int) -> Fits:
    stream = torch.Generator().manual_seed(seed)
    alone = exposure.layer == 0  # embeddings or the first cache: no attention yet
    table = _table(target, exposure if alone else Exposure("hidden", 1))
    below = None if alone or exposure.kind != "kv" else Exposure("hidden", exposure.layer)
    made: list[Fit] = []
    spent = target.vocabulary
    for shape, first in (((samples // 2, 1), 0), ((-(-samples // _LENGTH), _LENGTH), 1)):
        tokens = _draw(target, shape, stream)
        rows = _run(target, exposure, tokens)[:, first:].flatten(0, 1)
        inputs = None
        if below is not None:
            inputs = _run(target, below, tokens)[:, first:].flatten(0, 1)
        spent += tokens.numel() * (1 if below is None else 2)
        made.append(_regress(table, tokens[:, first:].flatten(), inputs, rows, alone))
    return Fits(made[0], made[1], spent)


def _head(target: Target, exposure: Exposure) -> Tensor | None:
    """The matrix that turns a last hidden state into scores of the next token; else None."""
    parts = target.parts
    if exposure != Exposure("hidden", parts.layers):
        return None
    head = getattr(target.model, "get_output_embeddings", lambda: None)()
    if head is not None:
        return head.weight.detach().float()
    tied = getattr(parts.base.config, "tie_word_embeddings", False)
    return parts.table.float() if tied else None


def _table(target: Target, exposure: Exposure) -> Tensor:
    """`z_v` (v, e) of each token alone; kept for fits of other layers too."""
    tokens = torch.arange(target.vocabulary, device=target.parts.device)[:, None]
    run = lambda: _run(target, exposure, tokens)[:, 0]  # noqa: E731
    return target.remembered("tokens alone", exposure, run)


def _draw(target: Target, shape: tuple[int, int], stream: torch.Generator) -> Tensor:
    """Random tokens, half of them log-uniform: frequent tokens come first in vocabularies."""
    rare = torch.randint(target.vocabulary, shape, generator=stream)
    common = target.vocabulary ** torch.rand(shape, generator=stream, dtype=torch.float64) - 1
    coin = torch.rand(shape, generator=stream) < 0.5
    return torch.where(coin, rare, common.long()).to(target.parts.device)


def _run(target: Target, exposure: Exposure, ids: Tensor) -> Tensor:
    """Rows (b, n, f) of texts ids (b, n)."""
    places = torch.arange(ids.shape[1], device=ids.device)
    return torch.cat([
        contents(
            target, exposure, capture(target.model, exposure, ids=part), places.expand(part.shape)
        )
        for part in ids.split(max(1, _CHUNK // ids.shape[1]))
    ])  # fmt: skip


def _regress(
    table: Tensor, tokens: Tensor, inputs: Tensor | None, rows: Tensor, alone: bool
) -> Fit:
    """Fit `A`, `μ` and the errors to rows (n, f) of tokens (n,), whose entries are in the table.

    `inputs` of the layer: fit in two steps by way of them. `alone`: `A = 1`.
    """
    size = rows.square().mean(-1)
    kept = size <= 25 * size.median()  # a few random tokens become attention sinks of their own
    if not bool(kept.any()):
        raise LinAlgError("the model's answers to random texts are not finite")
    tokens = tokens[kept]
    x, y = table[tokens].double(), rows[kept].double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    if alone:
        matrix, freedom = torch.eye(x.shape[1], dtype=x.dtype, device=x.device), 0.0
    elif inputs is None:
        matrix, freedom = ridge(x, y)
    else:
        layer_input = inputs[kept].double()
        layer_input = layer_input - layer_input.mean(0)
        matrix, freedom = ridge(x, layer_input)
        matrix = matrix @ ridge(layer_input, y)[0]
    errors = (y - x @ matrix) / max(1 - freedom / len(x), 0.1)
    predicted = ((table.double() - x_mean) @ matrix).to(table)
    spread = y.std(0).clamp(min=1e-9)
    seen, meant = rows[kept][:_SEEN], tokens[:_SEEN]
    return Fit(y_mean.to(table), predicted, errors, spread, seen, meant)


def ridge(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """`A` with `y ≈ x A`, close to diagonal if it is square, and its degrees of freedom.

    x and y are centred. The strength, relative to the number of rows and to the variance of each
    column of x, is the one of 15 from 1e-5 to 100 that generalised cross-validation prefers.
    """
    scale = x.std(0).clamp(min=1e-12)
    matrix = x.new_zeros(x.shape[1], y.shape[1])
    if x.shape[1] == y.shape[1]:
        matrix = ((x * y).sum(0) / x.square().sum(0).clamp(min=1e-12)).diag()
    remainder, x = y - x @ matrix, x / scale
    values, vectors = torch.linalg.eigh(x.mT @ x)
    values = values.clamp(min=0)
    weights = vectors.mT @ (x.mT @ remainder)
    unit = remainder.var(0).clamp(min=1e-24)
    squares = weights.square() / unit
    total = (remainder.square().sum(0) / unit).sum()
    best = (float("inf"), 0.0, 0.0)
    for strength in (_STRENGTHS * len(x)).tolist():
        freedom = float((values / (values + strength)).sum())
        # ‖remainder − X V (Λ + s)⁻¹ w‖² with VᵀXᵀX V = Λ and w = VᵀXᵀ remainder, without X.
        gain = (2 - values / (values + strength)) / (values + strength)
        loss = float(total - (gain[:, None] * squares).sum()) / remainder.numel()
        loss = max(loss, 0.0) / max(1 - freedom / len(x), 0.05) ** 2
        if loss < best[0]:
            best = (loss, strength, freedom)
    correction = vectors @ (weights / (values + best[1])[:, None])
    return matrix + correction / scale[:, None], best[2]


def _precision(errors: Tensor, unit: Tensor, error: Tensor | float) -> Tensor:
    """The inverse covariance of errors (n, f), correlations shrunk, the leak's own error added."""
    spread = errors.std(0).clamp(min=_LEAST_ERROR * unit)
    correlation = (errors / spread).mT @ (errors / spread) / len(errors)
    correlation = (1 - _SHRINKAGE) * correlation + _SHRINKAGE * torch.eye(len(unit)).to(errors)
    inverse = torch.linalg.inv(correlation + (error / spread).square().diag())
    return inverse / spread / spread[:, None]
