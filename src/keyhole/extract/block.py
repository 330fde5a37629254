"""A Transformer block as it is: attention, feed-forward layer, biases, norms, residuals (ours).

The target is `y` of oracle/block.py. Nothing of this is assumed: whether there are norms and which,
the activation, gates, widths, heads and every ε show in the answers, the last token's vectors or
scores.

    single tokens        the softmax of one token is 1: y is a function of one vector
    blocks/units.py      the units of the feed-forward layer from how it bends
    blocks/fit.py        all of its numbers, by least squares
    M = Σ_h V_h O_h      with norms from tokens of ordinary length, without from pairs [p + x ; p]
    sub_layer.py         everything else of attention, from answers that the layer is taken off of

Without norms, `y([v]) = (v + vM) + F(v + vM)`: a feed-forward layer of v beside a linear map. Every
answer is that of some single token v, `h = v(1 + M)`, and

    v([p + x ; p]) − v([p − x ; p]) = x·M(1 + M)⁻¹      (σ(s) + σ(−s) = 1 in every head)

is M, near enough to tell the units' signs; then 1 + M is what stands beside them. y may have
several v. Scores are products of p and x, so p is long and x short: the right v is near p.

Behind norms, `y = h + F(N(h))` with `h = x + b + N(x)M`. Far out N(h) = N(x), and y − x is a
feed-forward layer on a sphere beside a linear map; tokens of ordinary length then show M and b,
which turn N(h) away from N(x), and both ε.

What can be known. Besides the symmetries of attention (sub_layer.py):
- the order of the units; the length of a unit's row in ReLU, and of G's with a gate, against its
  column of C: they have length 1 here;
- φ(z) or φ(−z), since φ(z) − φ(−z) = z for ReLU, GELU and SiLU: the signs are those for which what
  stands beside the units is the residual alone;
- without norms, b is 0: it moves into the biases of the feed-forward layer, `F(h + b) + b`;
- a norm's gain and bias are part of what follows; behind a LayerNorm the mean of rows is 0.

Limits. Blocks of 128 numbers and more are read where there are norms (blocks/in_front.py). Smooth
units of others are told apart by how they bend, and their number is bounded by the width d: about
d²/2 in all, half as many with gates. ReLU units have kinks instead (blocks/kinks.py). Norms behind
the sums (BERT, PyTorch's layer) are blocks/behind.py's.

Scores, `s = w·y`, are read behind norms (docs/mathematics.md says why nothing but C and c is lost):
w is what s grows with, units and M follow as above with more questions for one number in an answer,
and heads are gated units themselves (blocks/heads.py). Without norms, and with positions, they are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import LinAlgError, least_squares
from keyhole.extract.arithmetic import EXACT, measured_errors
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks import kinks
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.behind import Behind
from keyhole.extract.blocks.behind import read as read_behind
from keyhole.extract.blocks.fit import Known, expect_fitted, fit, values
from keyhole.extract.blocks.heads import attempted, chosen, read_heads
from keyhole.extract.blocks.in_front import WIDE
from keyhole.extract.blocks.in_front import read as read_in_front
from keyhole.extract.blocks.units import Field, Units, derivative, find_units
from keyhole.extract.blocks.view import FAR, View, last
from keyhole.extract.extraction import Step
from keyhole.extract.gauss_newton import levenberg, refined
from keyhole.extract.judge import Method
from keyhole.extract.output_layer import exact_decimals
from keyhole.extract.sub_layer import read_attention
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.block import Block
from keyhole.oracle.protocol import NotFinite, Oracle, ask
from keyhole.oracle.sub_layer import SubLayer

_LONG, _LONGER = 2.0**16, 2.0**24  # of vectors, and of scores
_MIDDLE = 2.0**12  # at which heads of a block that gives scores are read
_HEADS = {16.0: ["O"], 1.0: ["Q", "q", "O"]}  # lengths of the last token, and what it shows
_RANK = 1e-6  # of the largest singular value of a head's matrix
_MORE = 1.5  # answers for each unknown of a fit
_MANY = 4.0  # likewise, where their rounding is what limits it
_SHORTER = (256.0, 16.0, 4.0)  # how long tokens are while M is sought
_LENGTHS = (16.0, 4.0, 1.0, 0.25)  # and in the fit of everything
_STEPS = 12  # of Gauss–Newton, at the most
_SETTLED = 1e-6
_ATTEMPTS = 3
_TINY = 1e-7  # a change of ε, to differentiate by it
_NEWTON = 20
_SIMPLE = 100
_PRECISELY, _ROUGHLY = 1e-11, 1e-9  # what attention adds, through a layer fitted to the last digits
_BATCH = 64
# Of √d: p and x in [p + x ; p]. With rotary positions p is 0.
_PAIRS = ((8.0, 0.125), (16.0, 0.0625), (4.0, 0.25), (0.0, 0.25), (0.0, 2.0**-6), (0.0, 2.0**-10))
_LENGTH = 64.0  # of tokens that ask, where there are norms
# How much longer the token that asks is than what the others have beside it, where no norm is in
# front: the longer, the more likely h is unique, at the cost of digits.
REACHES = {
    "none": (64.0, 256.0, 16.0, 256.0, 64.0, 1024.0),
    "behind": (4.0, 8.0, 2.0, 16.0, 32.0, 4.0),
}
_AGAIN = 6
_FRESH = 8
_TOKENS = 4
_ROUGH = 1e-3  # of the answers: how far attention may be off before it is polished
_MOST = 3000  # numbers that are polished together
_SIGN = 0.05  # how far from 0 or 1 the share of a turned unit may be


@dataclass(frozen=True)
class TransformerBlock(Method):
    """Exact extraction of a whole block that returns vectors, or behind norms scores."""

    seed: int = 0
    tolerance: float = 1e-8
    device: str = "cpu"  # where a wide block is solved for

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        yield from if_exact(oracle, self._steps(oracle))

    def _steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = torch.Generator().manual_seed(self.seed)
        view = View.open(oracle, stream)
        if view.norm == "behind":
            undone = read_behind(partial(last, oracle), view.dim, torch.device(self.device), stream)
            undone = replace(undone, every_token=view.every_token, causal=view.causal)
        elif view.norm == "none":
            undone = _without_norm(view, self.seed, stream)
        else:
            undone = behind_norms(view, torch.device(self.device), stream)
        model = self._model(view, undone, stream)
        yield Step(
            model, model.unknowns, model.unknowns, numbers=view.numbers, remark=_described(model)
        )

    def _model(self, view: View, undone: _Undone | Behind, stream: torch.Generator) -> Block:
        """With attention; read again from other questions where an h was not the right one."""
        tokens = torch.randn(_FRESH, _TOKENS, view.dim, generator=stream, dtype=torch.float64)
        answers = last(view.oracle, tokens)
        why = "what was read does not answer alike"
        for reach in REACHES.get(view.norm, (1.0,) * _AGAIN):
            try:
                if view.scores and isinstance(undone, _Undone):
                    model = _with_heads(undone, stream)
                else:
                    layer = undone.attention(stream, reach)
                    model = undone.block(undone.polished(layer, stream))
                off = (last(model, tokens) - answers).abs().max()
                if float(off) <= _ROUGH * float(answers.abs().max()):
                    return _polished(view, model, stream)
            except (Unsuccessful, LinAlgError, NotFinite, LostSum) as error:
                why = str(error)
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"{len(undone.units.A)} {undone.units.activation} units were read, but not the "
            f"attention in front of them: {why}",
        )


def if_exact(oracle: Oracle, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps; where they fail and the answers are coarse, nothing could be checked."""
    try:
        yield from steps
    except (Unsuccessful, LinAlgError, NotFinite) as end:
        if (error := _coarse(oracle)) > EXACT:
            raise Unsuccessful(
                Status.UNVERIFIED,
                f"{end}; the answers are exact to {error:.0e}, and units are told apart by "
                "differences of answers exact to 1e-12: float64 would do",
            ) from end
        raise


def _coarse(oracle: Oracle) -> float:
    """The relative error of the answers."""
    x = torch.eye(oracle.dim, dtype=torch.float64)[:2].unsqueeze(0)
    y = ask(oracle, x)
    decimals = exact_decimals(y)
    error, _ = measured_errors(oracle, x, y, y)
    return error if decimals is None else 10.0**-decimals / float(y.abs().max().clamp(min=1e-300))


def _polished(view: View, model: Block, stream: torch.Generator) -> Block:
    """All numbers at once, by least squares: the solves in a row cost digits.

    In a wide block those of attention only; the feed-forward layer's were fitted together.
    """
    names, more = [name for name in model.NAMES if getattr(model, name).numel()], _MORE
    if sum(getattr(model, name).numel() for name in names) > _MOST:
        more = _MANY
        names = [name for name in names if name in SubLayer.NAMES]
    if sum(getattr(model, name).numel() for name in names) > 4 * _MOST:
        return model
    names = [name for name in names if name != "b" or model.norm != "none"]
    unknowns = sum(getattr(model, name).numel() for name in names)
    count = math.ceil(more * unknowns / view.numbers) + 16
    tokens = torch.randn(count, _TOKENS, view.dim, generator=stream, dtype=torch.float64)
    if model.norm == "behind":  # both ε have been read one by one so far
        names = [*names, "epsilon", "epsilon_behind"]
        tokens[::2] *= torch.logspace(-3, 0, len(tokens[::2]), dtype=torch.float64)[:, None, None]
    y = ask(view.oracle, tokens)
    model = refined(model, names, [(tokens, y, torch.ones_like(y))])
    epsilon, behind = (max(0.0, float(each)) for each in (model.epsilon, model.epsilon_behind))
    return replace(model, epsilon=epsilon, epsilon_behind=behind)


@dataclass(frozen=True)
class _Network:
    """`h ↦ h·R + C·f(N(h)) + c`, in the coordinates of the view, R its residual."""

    view: View
    units: Units
    c: Tensor
    epsilon: float = 0.0

    def __call__(self, h: Tensor) -> Tensor:
        inside = values(self.units, self.view.normed(h, self.epsilon))
        return h @ self.view.residual + inside @ self.units.C.mT + self.c

    def slopes(self, h: Tensor) -> Tensor:
        """dy/dh, (n, m, d) with h last."""
        return self.view.residual.mT + _slopes(self.view, self.units, h, self.epsilon)

    def undone(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """An h that answers with y, and what is left, relative to y.

        By h ← y − F(N(h)) where that is a contraction, as it is of long h; else Newton's method.
        """
        parts = zip(y.split(_BATCH), h.split(_BATCH), strict=True)
        ends = [self._undone(*part) for part in parts]
        h, rest = (torch.cat(part) for part in zip(*ends, strict=True))
        return h, rest

    def _undone(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        scale, h = y.abs().amax(1), h.clone()
        rest = self(h) - y
        simple = self.view.norm != "none" and not self.view.scores
        for _ in range(_SIMPLE if simple else 0):
            new = self(h - rest) - y
            better = new.square().sum(1) < 0.5 * rest.square().sum(1)
            if not bool(better.any()):
                break
            h = torch.where(better[:, None], h - rest, h)
            rest = torch.where(better[:, None], new, rest)
        going = torch.nonzero(rest.abs().amax(1) > 4e-15 * scale)[:, 0]
        for _ in range(_NEWTON if len(going) else 0):
            at, off = h[going], rest[going]
            step = torch.linalg.solve(self.slopes(at), off[..., None])[..., 0]
            size, share = off.square().sum(1), torch.ones(len(at), 1, dtype=torch.float64)
            tried = off
            for _ in range(4):
                tried = self(at - share * step) - y[going]
                worse = tried.square().sum(1) > size
                if not bool(worse.any()):
                    break
                share = torch.where(worse[:, None], share / 5, share)
            h[going], rest[going] = at - share * step, tried
            arrived = tried.abs().amax(1) <= 4e-15 * scale[going]
            stuck = (share[:, 0] < 1) & (size < 1e-24 * scale[going].square())
            going = going[~(arrived | stuck)]
            if not len(going):
                break
        rest = self(h) - y
        return h, rest.abs().amax(1) / scale


def _inner_slopes(units: Units, u: Tensor) -> Tensor:
    """df/du, (n, width, e)."""
    z = u @ units.A.mT + units.a
    slope = derivative(units.activation, 1)(z)
    if not len(units.G):
        return slope[..., None] * units.A
    gates, inside = u @ units.G.mT + units.g, derivative(units.activation, 0)(z)
    return (slope * gates)[..., None] * units.A + inside[..., None] * units.G


def _slopes(view: View, units: Units, h: Tensor, epsilon: float) -> Tensor:
    """d(C·f(N(h)))/dh, (n, m, d)."""
    outer = units.C @ _inner_slopes(units, view.normed(h, epsilon))
    return _in_front(view, outer, h, epsilon)


def _in_front(view: View, outer: Tensor, h: Tensor, epsilon: float) -> Tensor:
    """Derivatives by h, from those (n, m, e) by N(h)."""
    if view.norm == "none":
        return outer
    u = view.normed(h, epsilon)
    centred = h - h.mean(1, keepdim=True) if view.norm == "layer" else h
    size = (centred.square().mean(1) + epsilon).sqrt()
    along = torch.einsum("nme,ne->nm", outer, u)
    full = outer @ view.axes.mT - along[..., None] * (u @ view.axes.mT)[:, None] / h.shape[1]
    return full / size[:, None, None]


def _count(view: View, units: Units, more: float = _MORE) -> int:
    """Answers for a fit of all numbers of the units, and of a linear map beside."""
    width, e = units.A.shape
    numbers = width * (e + 1) * (2 if len(units.G) else 1) + width * view.numbers
    return math.ceil(more * (numbers + (e + 1) * view.dim) / view.numbers) + 16


def _of_lengths(
    view: View, units: Units, lengths: Sequence[float], more: float, stream: torch.Generator
) -> Tensor:
    """So many tokens, of several lengths."""
    count = math.ceil(_count(view, units, more) / len(lengths)) + 8
    return torch.cat([view.tokens(count, length, stream) for length in lengths])


def _without_norm(view: View, seed: int, stream: torch.Generator) -> _Undone:
    d = view.dim
    bent = not kinks.straight(view.ask, d, stream)

    def start() -> tuple[Units, Tensor]:
        if bent:
            units, lengths = find_units(Field(view.ask, d, sphere=False, numbers=d), stream), (1.0,)
        else:  # of long tokens, half are on either side of every kink, whatever the bias
            units, lengths = kinks.find_relu_units(view.ask, d, seed, stream), _LENGTHS[:-1]
        x = _of_lengths(view, units, lengths, _MANY, stream)
        beside = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        units, _, linear, left = fit(units, Known(x, beside), view.ask(x))
        expect_fitted(left)
        return units, linear

    units, linear = attempted(start, _ATTEMPTS if bent else 1)
    single = _Single(units, linear[:-1], linear[-1])
    for long, short in _PAIRS:
        p = long * math.sqrt(d) * random_orthogonal(d, stream)[0]
        basis = short * math.sqrt(d) * random_orthogonal(d, stream)
        both = torch.cat([basis, -basis])
        y = last(view.oracle, torch.stack([p + both, p.expand_as(both)], 1))
        forth, back = single.undone(y, p + both / 4).chunk(2)
        shrunk = least_squares(basis, forth - back)  # M(1 + M)⁻¹
        R = torch.eye(d, dtype=torch.float64) - shrunk  # (1 + M)⁻¹
        placed = replace(units, A=units.A @ R.mT)
        turned = unit_signs(placed, R @ linear[:-1] - torch.eye(d, dtype=torch.float64))
        if turned is None:
            continue
        # Once the signs are known, 1 + M stands beside the units of single tokens.
        through = linear[:-1] + (turned[:, None] * units.A).mT @ units.C.mT
        A, G = (torch.linalg.solve(through, part.mT).mT for part in (units.A, units.G))
        placed = turned_units(replace(units, A=A, G=G), turned)
        network = _Network(view, placed, linear[-1] + units.C @ (turned * units.a))
        M = through - torch.eye(d, dtype=torch.float64)
        return _Undone(view, network, M, torch.zeros(d, dtype=torch.float64))
    raise _not_a_block()


def _not_a_block() -> Unsuccessful:
    return Unsuccessful(
        Status.NOT_APPLICABLE,
        "what single tokens answer is not a residual and a feed-forward layer",
    )


@dataclass(frozen=True)
class _Single:
    """Answers to single tokens, `v·N + C·f(v) + c`."""

    units: Units
    linear: Tensor
    c: Tensor

    def undone(self, y: Tensor, v: Tensor) -> Tensor:
        """As the network's, with v(1 + M) in the place of h."""
        for _ in range(_NEWTON):
            rest = v @ self.linear + values(self.units, v) @ self.units.C.mT + self.c - y
            if float(rest.abs().max()) <= 4e-15 * float(y.abs().max()):
                break
            jacobian = self.linear.mT + self.units.C @ _inner_slopes(self.units, v)
            v = v - torch.linalg.solve(jacobian, rest[..., None])[..., 0]
        return v


def unit_signs(units: Units, beside: Tensor) -> Tensor | None:
    """Which units to turn, 1 or 0, so that nothing linear (e, d) stands beside them."""
    products = (units.A[:, :, None] * units.C.mT[:, None]).flatten(1)  # A_k ⊗ c_k
    if len(units.G):
        shares = torch.zeros(len(units.A), dtype=torch.float64)
    elif products.shape[1] < len(products):
        shares = chosen(products, -beside.flatten())
    else:
        shares = least_squares(products.mT, -beside.flatten()[:, None])[:, 0]
    turned = (shares > 0.5).to(torch.float64)
    off = (shares - turned).abs().max()
    rest = beside.flatten() + turned @ products
    if float(off) > _SIGN or float(rest.abs().max()) > 1e-2 * float(1 + beside.abs().max()):
        return None
    return turned


def turned_units(units: Units, turned: Tensor) -> Units:
    """Of φ(z) = φ(−z) + z the other one: `(A_k·u + a_k)·c_k` goes to what stands beside."""
    sign = 1 - 2 * turned
    return replace(units, A=units.A * sign[:, None], a=units.a * sign)


def behind_norms(view: View, device: torch.device, stream: torch.Generator) -> _Undone:
    """Everything but the heads, and what the heads are asked through."""
    if view.axes.shape[1] >= WIDE and not view.scores:
        found = read_in_front(view.ask, view.axes, device, stream)
        network = _Network(view, found.units, found.c, found.behind)
        return _Undone(view, network, found.M, found.b, found.epsilon, device)

    def start() -> tuple[Units, _Shifted]:
        return _rough(view, *far_units(view, stream), stream)

    units, inputs = attempted(start, _ATTEMPTS)
    x = _of_lengths(view, units, _LENGTHS, _MORE, stream)
    units, inputs, linear, left = fit(units, replace(inputs, x=x), view.ask(x))
    expect_fitted(left)
    network = _Network(view, units, linear[0], inputs.behind)
    return _Undone(view, network, inputs.M, inputs.b, inputs.epsilon)


@dataclass(frozen=True)
class _Shifted:
    """u = N(h) with h = x + N(x)M + b, where M, b and both ε are sought: (e + 1)·d + 2 numbers."""

    view: View
    x: Tensor
    M: Tensor
    b: Tensor
    epsilon: float = 0.0
    behind: float = 0.0

    @property
    def h(self) -> Tensor:
        return self.x + self.view.normed(self.x, self.epsilon) @ self.M + self.b

    @property
    def u(self) -> Tensor:
        return self.view.normed(self.h, self.behind)

    @property
    def added(self) -> Tensor:
        return self.h @ self.view.residual

    @property
    def beside(self) -> Tensor:
        return torch.ones(len(self.x), 1, dtype=torch.float64)

    def jacobian(self, units: Units) -> Tensor:
        view = self.view
        outer = view.residual.mT + _slopes(view, units, self.h, self.behind)
        t = view.normed(self.x, self.epsilon)
        of_M = torch.einsum("ne,nmj->nmej", t, outer).flatten(2)
        front = (view.normed(self.x, self.epsilon + _TINY) - t) / _TINY @ self.M
        behind = values(units, view.normed(self.h, self.behind + _TINY)) - values(units, self.u)
        of_both = torch.stack([(outer @ front[..., None])[..., 0], behind @ units.C.mT / _TINY], 2)
        return torch.cat([of_M, outer, of_both], 2)

    def moved(self, step: Tensor) -> _Shifted:
        e, d = self.M.shape
        step = step[-(e + 1) * d - 2 :]
        return replace(
            self, M=self.M + step[: e * d].view(e, d), b=self.b + step[e * d : -2],
            epsilon=max(0.0, self.epsilon + float(step[-2])),
            behind=max(0.0, self.behind + float(step[-1])),
        )  # fmt: skip


def far_units(view: View, stream: torch.Generator) -> tuple[Units, Tensor]:
    """What long tokens show, y − x = u·Λ + C·f(u) + κ with u = N(x): the units, Λ and κ in rows."""
    d, e = view.axes.shape
    shrink = math.sqrt(d / e)

    def far(xi: Tensor, length: float = FAR) -> Tensor:
        x = length * xi @ view.axes.mT
        return view.ask(x) - x @ view.residual

    nearer = partial(far, length=_LONG)
    if not view.scores and kinks.straight_on_sphere(nearer, e, math.sqrt(d), stream):
        units, _ = kinks.find_relu_units_on_sphere(nearer, e, math.sqrt(d), stream)
    else:
        units = find_units(Field(far, e, sphere=True, numbers=view.numbers), stream)
        units = replace(units, A=units.A / shrink, G=units.G / shrink)
    x = view.tokens(_count(view, units), _LONGER if view.scores else _LONG, stream)
    u = view.normed(x, 0.0)
    features = torch.cat([u, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    units, _, linear, left = fit(units, Known(u, features), view.ask(x) - x @ view.residual)
    expect_fitted(left, 1e-3)
    return units, linear


def _rough(
    view: View, units: Units, linear: Tensor, stream: torch.Generator
) -> tuple[Units, _Shifted]:
    """M, b and the signs, from shorter and shorter tokens."""
    d, e = view.axes.shape
    # φ(z) and φ(−z) differ by a part of Λ, which is M else; with gates they do not.
    M, b = torch.zeros(e, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    if len(units.G) and not view.scores:
        M = linear[:-1]
    for length in _SHORTER:
        M, b = _attention_sum(view, units, linear, (M, b), length, stream)
    turned = unit_signs(units, linear[:-1] - M @ view.residual)
    if turned is None:
        raise _not_a_block()
    return turned_units(units, turned), _Shifted(view, torch.empty(0, d), M, b)


def _attention_sum(
    view: View, units: Units, linear: Tensor, start: tuple[Tensor, Tensor], length: float,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """M and b from tokens of one length, by Gauss–Newton steps, while the units' signs are open.

    With h = x + tM + b, t = N(x) and u = N(h), y = hR + u(Λ − MR) + C·f(u) + κ − bR.
    """
    M, b = start
    e, d = M.shape
    R = view.residual
    x = view.tokens(math.ceil(_MORE * (e + 1) * d / view.numbers) + 8, length, stream)
    y, t = view.ask(x), view.normed(x, 0.0)

    def look(both: Tensor) -> tuple[Tensor, Tensor]:
        M, b = both[: e * d].view(e, d), both[e * d :]
        h = x + t @ M + b
        u = view.normed(h, 0.0)
        beside = linear[:-1] - M @ R
        miss = (h - b) @ R + u @ beside + values(units, u) @ units.C.mT + linear[-1] - y
        outer = units.C @ _inner_slopes(units, u) + beside.mT
        outer = _in_front(view, outer, h, 0.0)
        of_M = torch.einsum("ne,nmj->nmej", t, outer + R.mT)
        of_M = of_M - torch.einsum("ne,mj->nmej", u, R.mT)
        return miss.flatten(), torch.cat([of_M.flatten(2), outer], 2).flatten(0, 1)

    both = torch.cat([M.flatten(), b])
    if view.scores:  # from M = 0 one number shows too little of it for whole steps
        both = levenberg(look, both)[0]
    else:
        for _ in range(_STEPS):
            miss, J = look(both)
            step = least_squares(J, miss[:, None])[:, 0]
            both = both - step
            if float(step.abs().max()) <= _SETTLED:
                break
    return both[: e * d].view(e, d), both[e * d :]


@dataclass(frozen=True)
class _Undone:
    """What attention answers, `h − x`, with everything behind it taken off: the last token's.

    Tokens are coordinates of the view. `y = h + F(N(h))` may have several solutions h, unless x is
    long next to what attention adds: behind a norm the last token is that long, and all tokens of
    its direction are one to attention.
    """

    view: View
    network: _Network
    M: Tensor
    b: Tensor
    epsilon: float = 0.0
    device: torch.device | str = "cpu"

    @property
    def dim(self) -> int:
        return self.view.axes.shape[1]

    @property
    def units(self) -> Units:
        return self.network.units

    @property
    def total(self) -> Tensor:
        """Σ_h M_h, for tokens behind an RMS norm of the coordinates."""
        d, e = self.view.axes.shape
        return self.M * math.sqrt(d / e)

    def surroundings(self) -> Surroundings:
        d, e = self.view.axes.shape
        plain = Surroundings(
            self, self.b, every_token=self.view.every_token, causal=self.view.causal,
            precision=_ROUGHLY if e >= WIDE else _PRECISELY,
        )  # fmt: skip
        if self.view.norm == "none":
            return plain
        # A LayerNorm of d numbers is an RMS norm of e = d − 1 coordinates, times √(d/e).
        epsilon = self.epsilon * d / e
        left = max(epsilon / _LENGTH**2, 1e-12)
        return replace(plain, epsilon=epsilon, last_norm=math.sqrt(e * (1 - left)))

    def block(self, layer: SubLayer) -> Block:
        """With the attention that its answers show."""
        view, lift, (d, e) = self.view, self.view.axes, self.view.axes.shape
        units = self.units.of_length_one
        scale = math.sqrt(e / d)  # an RMS norm of e coordinates next to that of d
        Q, K, V = (scale * lift @ part for part in (layer.Q, layer.K, layer.V))
        return Block(
            Q=Q.contiguous(), q=layer.q, K=K.contiguous(), V=V.contiguous(), O=layer.O, b=layer.b,
            frequencies=layer.frequencies, A=(units.A @ lift.mT).contiguous(), a=units.a,
            G=(units.G @ lift.mT).contiguous(), g=units.g, C=units.C.contiguous(),
            c=self.network.c, norm=view.norm,
            w=view.residual[:, 0] if view.scores else torch.zeros_like(units.a[:0]),
            activation=units.activation, epsilon=(layer.epsilon or 0.0) * e / d,
            epsilon_behind=self.network.epsilon, every_token=view.every_token, causal=view.causal,
        )  # fmt: skip

    def attention(self, stream: torch.Generator, reach: float) -> SubLayer:
        return read_attention(self.surroundings(), stream, self.total, reach)

    def polished(self, attention: SubLayer, stream: torch.Generator) -> SubLayer:
        """All numbers of attention at once, where `_polished` would not take as many."""
        around = self.surroundings()
        numbers = sum(getattr(attention, name).numel() for name in attention.NAMES)
        if around.last_norm is None or numbers <= 4 * _MOST:
            return attention
        sequences = Sequences.drawn(attention, stream, around.last_norm)
        sums = around.answer(sequences.tokens) + around.b
        return fitted_heads(attention, sequences, sums, lambda added: added, self.device, stream)

    def __call__(self, sequences: Tensor) -> Tensor:
        tokens = sequences @ self.view.axes.mT
        y = last(self.view.oracle, tokens)
        t = self.view.normed(tokens.flatten(0, 1), self.epsilon).unflatten(0, tokens.shape[:2])
        x = tokens[:, -1]
        if self.view.norm != "none":
            y = y + self._missed(x)
        return self.network.undone(y, x + t.mean(1) @ self.M + self.b)[0] - x

    def _missed(self, x: Tensor) -> Tensor:
        """What the network gets wrong of each token alone: nearly the same of sums near by."""
        x, of = torch.unique(x, dim=0, return_inverse=True)
        h = x + self.view.normed(x, self.epsilon) @ self.M + self.b
        return (self.network(h) - self.view.ask(x))[of]


def _with_heads(undone: _Undone, stream: torch.Generator) -> Block:
    """Of a block that gives scores: W_h and what w shows of M_h, then M_h from shorter tokens."""
    view, M = undone.view, undone.M
    (d, e), w = view.axes.shape, view.residual

    def value(t: Tensor, asking: Tensor) -> Tensor:
        left = 1 - t.square().sum(1, keepdim=True) / d
        tokens = torch.stack([(undone.epsilon / left).sqrt() * t, _MIDDLE * asking], 1)
        x = tokens[:, -1] @ view.axes.mT
        y = last(view.oracle, tokens @ view.axes.mT)
        return y - undone.network(x + view.normed(x, undone.epsilon) @ M + undone.b)

    heads = read_heads(value, e, math.sqrt(d), stream)
    count = len(heads.v)
    own = heads.v - (M @ w)[:, 0] / count  # of what w shows, beyond an even share
    O = M / count + own[..., None] * w[:, 0] / w.square().sum()  # noqa: E741
    grow = math.sqrt(d / e)  # to tokens behind an RMS norm of the coordinates
    identity = torch.eye(e, dtype=torch.float64).expand(count, e, e)
    layer = SubLayer(
        Q=grow * heads.W.mT, q=heads.c, K=grow * identity, V=grow * identity, O=O, b=undone.b,
        frequencies=heads.c[:, :0], epsilon=undone.epsilon * d / e,
    )  # fmt: skip
    model = undone.block(layer)
    for length, names in _HEADS.items():
        unknowns = sum(getattr(model, name).numel() for name in names)
        tokens = view.tokens(2 * math.ceil(_MORE * unknowns) + 32, 1.0, stream)
        tokens = tokens.unflatten(0, (-1, 2))
        tokens[:, -1] *= length
        y = ask(view.oracle, tokens)
        model = refined(model, names, [(tokens, y, torch.ones_like(y))])
    seen = view.axes @ view.axes.mT  # steps may leave what no token has in Q
    Q, K = factored(seen @ model.Q @ model.K.mT)
    V, O = factored(model.V @ model.O)  # noqa: E741
    q = torch.linalg.lstsq(K, model.K @ model.q[..., None]).solution[..., 0]
    return replace(model, Q=Q, K=K, q=q, V=V, O=O.mT.contiguous())


def factored(products: Tensor, least: float = _RANK) -> tuple[Tensor, Tensor]:
    """X and Y with products XYᵀ (heads, n, m), of the rank that they have."""
    left, sizes, right = torch.linalg.svd(products, full_matrices=False)
    rank = int((sizes > least * sizes[:, :1]).sum(1).max())
    root = sizes[:, None, :rank].sqrt()
    return left[..., :rank] * root, right.mT[..., :rank] * root


def _described(model: Block) -> str:
    heads, _, k = model.Q.shape
    parts = [f"{heads} heads of width {k}"]
    if len(model.K) < heads:
        parts.append(f"{heads // len(model.K)} share keys and values each")
    if model.sub_layer.rotary:
        parts.append("rotary positions")
    if len(model.places):
        parts.append(f"a bias of positions up to a distance of {model.places.shape[1] - 1}")
    parts.append(f"{len(model.A)} {model.activation} units" + " with gates" * bool(len(model.G)))
    norm = {"none": "no norms", "rms": "RMS norms", "layer": "LayerNorms",
            "behind": "LayerNorms behind the sums"}[model.norm]  # fmt: skip
    if model.epsilon or model.epsilon_behind:
        norm += f" (epsilon {model.epsilon:.2e} and {model.epsilon_behind:.2e})"
    return ", ".join([*parts, norm])
