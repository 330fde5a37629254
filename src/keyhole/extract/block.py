"""A Transformer block as it is: attention, feed-forward layer, biases, norms, residuals (ours).

The target, where N is a norm or the identity (oracle/block.py also has norms behind the
sums):

    h = x_n + Attention(N(x_1), …, N(x_n))_n            (oracle/sub_layer.py)
    y = h + F(h),    F(h) = C·f(N(h)) + c               for scores w·h + F(h), one number
    f_k(u) = φ(A_k·u + a_k)                             (times G_k·u + g_k if gated)

Nothing else is assumed: whether there are norms and which, the activation, gates,
widths, heads and every ε follow from the last token's vectors or scores. They are read
in this order:

    single tokens          the softmax of one token is 1: y is a function of one vector
    blocks/curvature.py    the units of the feed-forward layer, from second derivatives of y;
    blocks/kinks.py        those of ReLU, from its kinks
    blocks/fit.py          all numbers of F, by least squares
    M = Σ_j V_j O_j        over heads j: h is x + N(x)M + b for a single token x
    blocks/peeled.py       h, for any tokens: y = h + F(h) is solved for h, which peels F off
    sub_layer.py           everything else of attention, from h

With norms, M follows from single tokens of ordinary length. Without them, h = v(1 + M)
for a single token v (b = 0, see below), and y is a feed-forward layer of v plus a
linear map. Let v(pair) be the single token with the h, and the answer, of a pair of
tokens. In [p + x ; p], a head attends to p + x with a weight σ(s), and in [p − x ; p]
to p − x with σ(−s). As these add up to 1,

    v([p + x ; p]) − v([p − x ; p]) = x·M(1 + M)⁻¹

which gives M closely enough to tell the units' signs; then 1 + M is the linear map.
Several v may give one y, and the search for v begins near p. So x is short, since the
right v is then near p, and p is long, since few units bend near a long vector.

Blocks with norms in front are read by blocks/pre_norm.py; those with norms behind the
sums (BERT, PyTorch's layer) by blocks/post_norm.py.

What can be known. Besides the symmetries of attention (sub_layer.py), these are free:
- the order of the units;
- the length of a ReLU unit's row of A, or of a row of G, against its column of C: here it is 1;
- φ(z) or φ(−z), since φ(z) − φ(−z) = z for ReLU, GELU and SiLU: the units' signs are those for
  which the linear part is the residual alone;
- without norms, b moves into the biases of the feed-forward layer, `F(h + b) + b`: here it is 0;
- a norm's gain and bias are part of what follows; behind a LayerNorm rows of A and G, and columns
  of Q, K and V, have mean 0, since the mean of what they are multiplied by is 0.

Limits. Smooth units are told apart by their second derivatives, and their number is
bounded by the dimension d of tokens: about d²/2, half as many with gates. ReLU units
have no such bound.

Scores, `w·y`, are read if there are norms in front (docs/mathematics.md says why
nothing but C and c is lost). Scores of long tokens show w. Units and M follow as above,
with more queries, since an answer has one number. As a function of one other token,
what a head adds is then itself a unit with a gate (blocks/heads.py). Scores without
norms, or with positions, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.float64 import Stream, identity, normal, random_stream, zeros
from keyhole.core.numerics import LinAlgError, least_squares, thin_svd
from keyhole.extract.arithmetic import EXACT, exact_decimals, measured_errors
from keyhole.extract.bilinear import max_abs, random_orthogonal
from keyhole.extract.blocks import kinks, post_norm, pre_norm
from keyhole.extract.blocks.curvature import Field, find_units
from keyhole.extract.blocks.fit import Known, expect_fitted, fit
from keyhole.extract.blocks.heads import attempted, read_heads
from keyhole.extract.blocks.peeled import MANY, Network, Peeled
from keyhole.extract.blocks.post_norm import PeeledPostNorm
from keyhole.extract.blocks.units import Units, with_ones
from keyhole.extract.blocks.view import View, last, not_a_block
from keyhole.extract.extraction import Step
from keyhole.extract.gauss_newton import refined
from keyhole.extract.judge import Method
from keyhole.extract.sub_layer import heads_described
from keyhole.extract.sub_layer_values import LostSum
from keyhole.oracle.block import Block
from keyhole.oracle.protocol import NotFinite, Oracle, ask
from keyhole.oracle.sub_layer import SubLayer

# of the last token, relative to √d, where heads are read from scores
_SCORES_LENGTH = 2.0**12
# Lengths of the last token, relative to the others', at which scores are fitted, and
# what changes.
_REFITTED = {16.0: ["O"], 1.0: ["Q", "q", "O"]}
# the least singular value that counts, relative to the largest one of a head's matrix
_RANK = 1e-6
_ANSWERS = 1.5  # answers for each unknown of a fit
_MORE_ANSWERS = 4.0  # the same, where more of them have to average their rounding out
_ATTEMPTS = 3  # to find the units of a block without norms
# Lengths of p and x in [p + x ; p], relative to √d, in turn. With rotary positions p
# must be 0: any other p has different scores in the two places, and then the two
# weights do not add up to 1.
_PAIRS = (
    (8.0, 0.125),
    (16.0, 0.0625),
    (4.0, 0.25),
    (0.0, 0.25),
    (0.0, 2.0**-6),
    (0.0, 2.0**-10),
)
# The length of the last token relative to the others' in each attempt to read
# attention, if no norm is in front of it: the longer it is, the more likely y has only
# one h, at the cost of digits.
REACHES = {
    "none": (64.0, 256.0, 16.0, 256.0, 64.0, 1024.0),
    "behind": (4.0, 8.0, 2.0, 16.0, 32.0, 4.0),
}
_PRE_NORM_ATTEMPTS = 6  # to read attention with norms in front
# sequences on which a block is checked, and the tokens of each
_CHECKED = 8
_TOKENS = 4
_ROUGH = 1e-3  # how far answers may be off before the last fit, relative to the largest
_MAX_FITTED = 3000  # numbers that are fitted together in the end


def explain_precision_failure(steps: Callable[[Any, Oracle], Iterator[Step]]) -> Any:
    """Let steps that fail because the answers are inexact give that as the reason."""

    def explained(self: Method, oracle: Oracle) -> Iterator[Step]:
        try:
            yield from steps(self, oracle)
        except (Unsuccessful, LinAlgError, NotFinite) as end:
            error = _relative_error(oracle)
            if error <= EXACT:
                raise
            raise Unsuccessful(
                Status.UNVERIFIED,
                f"{end}; the answers are exact to {error:.0e}, and units are told apart by "
                "differences of answers exact to 1e-12: float64 would do",
            ) from end

    return explained


def _relative_error(oracle: Oracle) -> float:
    x = identity(oracle.dim)[:2][None]
    y = ask(oracle, x)
    decimals = exact_decimals(y)
    error, _ = measured_errors(oracle, x, y, y)
    if decimals is None:
        return error
    return 10.0**-decimals / max(max_abs(y), 1e-300)


@dataclass(frozen=True)
class TransformerBlock(Method):
    """Exact extraction of a whole block that returns vectors, or behind norms scores."""

    seed: int = 0
    tolerance: float = 1e-8
    device: str = "cpu"  # where a wide block is solved for

    @explain_precision_failure
    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        device = torch.device(self.device)
        view = View.open(oracle, stream)
        if view.norm == "behind":
            peeled = post_norm.read(partial(last, oracle), view.dim, device, stream)
            peeled = replace(peeled, every_token=view.every_token, causal=view.causal)
        elif view.norm == "none":
            peeled = _without_norm(view, self.seed, stream)
        else:
            peeled = pre_norm.read(view, device, stream)
        model = self._model(view, peeled, stream)
        yield Step(
            model,
            model.unknowns,
            model.unknowns,
            numbers=view.numbers,
            remark=_described(model),
        )

    def _model(
        self,
        view: View,
        peeled: Peeled | PeeledPostNorm,
        stream: Stream,
    ) -> Block:
        """Return the block, attention included.

        Attention is read again with other queries if an h was not the right one.
        """
        tokens = normal(stream, _CHECKED, _TOKENS, view.dim)
        answers = last(view.oracle, tokens)
        allowed = _ROUGH * max_abs(answers)
        why = "what was read gives other answers"
        for reach in REACHES.get(view.norm, (1.0,) * _PRE_NORM_ATTEMPTS):
            try:
                if view.scores and isinstance(peeled, Peeled):
                    model = _from_scores(peeled, stream)
                else:
                    layer = peeled.attention(stream, reach)
                    model = peeled.block(peeled.polished(layer, stream))
                if max_abs(last(model, tokens) - answers) <= allowed:
                    return _fitted_together(view, model, stream)
            except (Unsuccessful, LinAlgError, NotFinite, LostSum) as error:
                why = str(error)
        units = peeled.units
        raise not_applicable(
            f"{len(units.A)} {units.activation} units were read, but not the attention in "
            f"front of them: {why}"
        )


def _fitted_together(
    view: View,
    model: Block,
    stream: Stream,
) -> Block:
    """Fit all numbers at once, by least squares: each solve that needs an earlier one costs digits.

    In a wide block only the numbers of attention are fitted, or none if even these are
    too many.
    """

    def count(names: list[str]) -> int:
        return sum(getattr(model, name).numel() for name in names)

    names = [name for name in model.NAMES if getattr(model, name).numel()]
    answers_each = _ANSWERS
    if count(names) > _MAX_FITTED:
        answers_each = _MORE_ANSWERS
        names = [name for name in names if name in SubLayer.NAMES]
    if count(names) > MANY:
        return model
    if model.norm == "none":
        names.remove("b")
    sequences = math.ceil(answers_each * count(names) / view.numbers) + 16
    tokens = normal(stream, sequences, _TOKENS, view.dim)
    if model.norm == "behind":  # both ε have been read one by one so far
        names = [*names, "epsilon", "epsilon_behind"]
        # The first ε counts most next to short tokens, so half of them are short.
        short = tokens[::2]
        short *= torch.logspace(-3, 0, len(short), dtype=torch.float64)[:, None, None]
    y = ask(view.oracle, tokens)
    model = refined(model, names, [(tokens, y, torch.ones_like(y))])
    return replace(
        model,
        epsilon=max(0.0, float(model.epsilon)),
        epsilon_behind=max(0.0, float(model.epsilon_behind)),
    )


def _without_norm(
    view: View,
    seed: int,
    stream: Stream,
) -> Peeled:
    """Return the feed-forward layer and M of a block without norms, as explained at the top.

    Units and a linear map are fitted as functions of a single token v. As functions of
    h = v(1 + M) they are A·Rᵀ and R·linear, R = (1 + M)⁻¹. There the linear map is the
    identity (the residual), plus a term for each unit that was read as φ(−z) = φ(z) −
    z: `flips` finds these units.
    """
    d = view.dim
    unit = identity(d)
    smooth = not kinks.straight(view.ask, d, stream)  # else the units are ReLU

    def start() -> tuple[Units, Tensor]:
        if smooth:
            units = find_units(Field(view.ask, d, sphere=False, numbers=d), stream)
            lengths = (1.0,)
        else:
            # of long tokens, half are on either side of every kink, whatever the unit's
            # bias
            units = kinks.find_relu_units(view.ask, d, seed, stream)
            lengths = pre_norm.LENGTHS[:-1]
        x = pre_norm.tokens_of_lengths(view, units, lengths, stream, _MORE_ANSWERS)
        units, _, linear, residual = fit(units, Known(x, with_ones(x)), view.ask(x))
        expect_fitted(residual)
        return units, linear

    units, linear = attempted(
        start, _ATTEMPTS if smooth else 1
    )  # (d + 1, d), the constant last
    single = Network(view, units, linear[-1], linear[:-1])
    for long, short in _PAIRS:
        p = long * math.sqrt(d) * random_orthogonal(d, stream)[0]
        basis = short * math.sqrt(d) * random_orthogonal(d, stream)
        both = torch.cat([basis, -basis])
        y = last(view.oracle, torch.stack([p + both, p.expand_as(both)], 1))
        # If all weights are ½, v is p + x·M(1 + M)⁻¹/2, or p + x/4 for M = 1: a start
        # near enough.
        forth, back = single.inverse(y, p + both / 4).chunk(2)
        R = unit - least_squares(basis, forth - back)  # 1 − M(1 + M)⁻¹ = (1 + M)⁻¹
        flips = replace(units, A=units.A @ R.mT).flips(R @ linear[:-1] - unit)
        if flips is None:
            continue
        # Once the signs are known, 1 + M is the linear map of single tokens.
        through = linear[:-1] + (flips[:, None] * units.A).mT @ units.C.mT
        A, G = (torch.linalg.solve(through, part.mT).mT for part in (units.A, units.G))
        placed = replace(units, A=A, G=G).flipped(flips)
        c = linear[-1] + units.C @ (flips * units.a)
        network = Network(view, placed, c, view.residual)
        return Peeled(view, network, through - unit, zeros(d))
    raise not_a_block()


def _from_scores(peeled: Peeled, stream: Stream) -> Block:
    """Return a block that answers with scores.

    Next to a very long last token, a score minus that of the last token alone is what
    the heads add: `read_heads` fits their Q_j K_jᵀ and M_j·w to it. To begin with, K_j
    = V_j = 1 (times `grow`), so that Q_j holds all of Q_j K_jᵀ and O_j all of M_j. Then
    scores of long and ordinary last tokens refit Q, q and O, and at the end the
    products are factored to their rank.
    """
    view = peeled.view
    M = peeled.M
    d, e = view.axes.shape  # e is d, or d − 1 behind a LayerNorm
    w = view.residual

    def value(t: Tensor, last_token: Tensor) -> Tensor:
        """Return what the heads add to scores if N of the first token is t."""
        share = 1 - t.square().sum(1, keepdim=True) / d
        # N(x) = x/√(|x|²/d + ε) is t if x = t·√(ε/share).
        first_token = (peeled.epsilon / share).sqrt() * t
        pair = torch.stack([first_token, _SCORES_LENGTH * last_token], 1)
        tokens = pair @ view.axes.mT
        alone = peeled.network(peeled.added_alone(tokens[:, -1]))
        return last(view.oracle, tokens) - alone

    heads = read_heads(value, e, math.sqrt(d), stream)
    count = len(heads.v)
    # M_j starts as an equal share of M, changed along w to have the M_j·w that was
    # read.
    missing = heads.v - (M @ w)[:, 0] / count
    O = M / count + missing[..., None] * w[:, 0] / w.square().sum()  # noqa: E741
    grow = math.sqrt(d / e)  # an RMS norm of the e coordinates returns √e instead of √d
    unit = identity(e).expand(count, e, e)
    layer = SubLayer(
        Q=grow * heads.W.mT,
        q=heads.c,
        K=grow * unit,
        V=grow * unit,
        O=O,
        b=peeled.b,
        frequencies=heads.c[:, :0],
        epsilon=peeled.epsilon * d / e,
    )
    model = peeled.block(layer)
    for length, names in _REFITTED.items():
        unknowns = sum(getattr(model, name).numel() for name in names)
        tokens = view.tokens(2 * math.ceil(_ANSWERS * unknowns) + 32, 1.0, stream)
        tokens = tokens.unflatten(0, (-1, 2))
        tokens[:, -1] *= length
        y = ask(view.oracle, tokens)
        model = refined(model, names, [(tokens, y, torch.ones_like(y))])
    # The fit may leave directions in Q that no token has.
    possible = view.axes @ view.axes.mT
    Q, K = factored(possible @ model.Q @ model.K.mT)
    V, O = factored(model.V @ model.O)  # noqa: E741
    q = least_squares(K, model.K @ model.q[..., None])[..., 0]
    return replace(model, Q=Q, K=K, q=q, V=V, O=O.mT.contiguous())


def factored(products: Tensor, least: float = _RANK) -> tuple[Tensor, Tensor]:
    """Return X and Y with products XYᵀ (heads, n, m), as wide as the rank of the products."""
    left, sizes, right = thin_svd(products)
    rank = int((sizes > least * sizes[:, :1]).sum(1).max())
    root = sizes[:, None, :rank].sqrt()
    return left[..., :rank] * root, right.mT[..., :rank] * root


def _described(model: Block) -> str:
    """Return the kind and number of the block's parts, in words."""
    parts = heads_described(model.sub_layer)
    if len(model.places):
        parts.append(
            f"a bias of positions up to a distance of {model.places.shape[1] - 1}"
        )
    gates = " with gates" if len(model.G) else ""
    parts.append(f"{len(model.A)} {model.activation} units{gates}")
    norm = {
        "none": "no norms",
        "rms": "RMS norms",
        "layer": "LayerNorms",
        "behind": "LayerNorms behind the sums",
    }[model.norm]
    if model.epsilon or model.epsilon_behind:
        norm += f" (epsilon {model.epsilon:.2e} and {model.epsilon_behind:.2e})"
    return ", ".join([*parts, norm])
