"""Infer how exact a leak is from its own numbers, and compare a text's numbers with it.

`precision_of` takes a leak and returns the error of each number; `compare` takes what
the model gives for a text and says where it agrees with the leak within that error.
Searches end by it, and judges decide by it.

A leaked number is y = f + ε. Rounding puts y on a grid: bfloat16 and float16 have few
bits of mantissa, integers have one step for each row (int8 with a scale for each token,
decimals, …). Then ε is uniform over a step, with variance step²/12. Noise leaves no
trace in y: it shows only in y − f of the right text (`compare`).

A quantised cache has a grid for each group of numbers, and every program groups them
differently: a token's numbers of a head (KIVI's values), a channel's over some tokens
(KIVI's keys; arXiv 2402.02750), all of a tensor (fp8). So every usual grouping is
tried. If its groups lie on grids, it is the right one: that does not happen by chance.

Arithmetic has errors too. Two machines, or two batch sizes, add up in different orders.
In float32 that hardly shows; in bfloat16 and float16 it does, and large random weights
enlarge it from layer to layer. So it is measured (`rounding_error`): random texts are
run one at a time, and again as a batch with the last bit of their embeddings changed.
The right text may differ from the leak by as much as these rows differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keyhole.core.tensors import indices_of, root_mean_square, seeded
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture, hooks
from keyhole.recover.attack import Target
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import Leak, rows_of

# the difference of float32 between machines, as a share of the root mean square
FLOAT32 = 3e-5
NOISE = 0.5  # noise above this share of the leak's spread may be a misfit as well
# the coarsest first, each with its bits of mantissa, the leading one included
_FLOATS = (
    ("float8_e5m2", torch.float8_e5m2, 3),
    ("float8_e4m3fn", torch.float8_e4m3fn, 4),
    ("bfloat16", torch.bfloat16, 8),
    ("float16", torch.float16, 11),
)
_GROUPS = (128, 64, 32, 16)  # numbers that share a scale
_SAMPLED = 64  # groups of a grouping that are tested first
_ENOUGH = 32  # so many numbers do not lie on a grid by chance
_NEAR = 0.05  # in steps: the error of a scaled 8-bit float that was rounded again
_NORMAL = (
    2.0**-4
)  # numbers above this share of the largest are no subnormal 8-bit floats
# the share of groups on grids that ends the search: constant groups are on none
_ALL = 0.95
# a smaller share is chance; it may be below 1, as KIVI does not round the last tokens
_FEW = 0.1
_LEVELS = 4  # so many different numbers do not lie on a grid of 127 steps by chance
_GRID = 5e-3  # in steps: how far from a multiple of the step a number may lie
_DEVIATIONS = 4.5  # standard deviations that chance is granted
# unknown noise above this share of the leak's spread is never confirmed
_CLAIMED = 0.15
# random texts that the arithmetic is measured on, and their tokens
_TEXTS = 4
_LENGTH = 32
_MARGIN = 1.5  # times the largest error of their positions
# fewer prove nothing about unknown noise
_MIN_POSITIONS = 4
_MIN_NUMBERS = 2000
_FAR_OFF = 1e6  # in units of the leak's spread: the error of a number that overflows
_TINY = 1e-30  # in place of 0 in a denominator


@dataclass(frozen=True, eq=False)
class Precision:
    """The errors of a leak's numbers (positions, numbers), as stated or inferred.

    `rounding` is the standard deviation of each number's error without noise. `noise`
    is that of the noise, if it is stated. Without noise, no error is larger than
    `most`. `scale` is the standard deviation of the leaked numbers, the unit of
    relative figures.
    """

    rounding: Tensor
    scale: float
    noise: float | None
    most: Tensor

    @cached_property
    def sigma(self) -> Tensor:
        """The standard deviation (positions, numbers) of each number's whole error."""
        return (self.rounding.square() + (self.noise or 0.0) ** 2).sqrt()

    @property
    def relative(self) -> float:
        """The root mean square of the errors, relative to the leak's spread."""
        return float(self.sigma.square().nanmean().sqrt()) / self.scale


def precision_of(leak: Leak, arithmetic: float = 0.0) -> Precision:
    """Return the precision of a leak, from its numbers and its stated noise.

    `arithmetic` is the model's own rounding error, as a share of each row's root mean
    square.
    """
    rows = leak.rows(leak.tensors).float()
    own = arithmetic * rows.square().nanmean(-1, keepdim=True).sqrt().nan_to_num(0.0)
    seen = rows[rows.isfinite()]
    scale = float(root_mean_square(seen - seen.mean()).clamp(min=_TINY))
    least = FLOAT32 * float(root_mean_square(seen))
    arithmetics = own.square() + least**2
    name, step = rounding_of(rows, leak.precision)
    # a head or other group may have a scale
    if name == "float32" and "keys" in leak.tensors:
        steps = {part: _grouped(tensor) for part, tensor in leak.tensors.items()}
        step = leak.rows(steps)
    rounding = (step.square() / 12 + arithmetics).sqrt()
    others = (arithmetics + (leak.noise or 0.0) ** 2).sqrt()
    return Precision(rounding, scale, leak.noise, step / 2 + _DEVIATIONS * others)


@torch.no_grad()
def rounding_error(target: Target, exposure: Exposure) -> float:
    """Return how far the model's arithmetic moves a row, relative to the row's length.

    That is the largest error of any position, times a margin; remembered for every
    exposure.
    """
    known = target.remembered("rounding", None, dict[Exposure, float])
    if exposure in known:
        return known[exposure]
    length = min(_LENGTH, target.parts.max_length)
    stream = seeded(0)
    ids = random_texts(target, _TEXTS, length, stream)
    texts = [rows_of(capture(target.model, exposure, ids=text[None])) for text in ids]
    alone = torch.cat(texts)

    def change_last_bit(
        _m: nn.Module,
        _i: Any,
        states: Tensor,
    ) -> Tensor:
        change = 2 * torch.rand(states.shape, generator=stream) - 1
        change = torch.finfo(states.dtype).eps * change.to(states.device)
        return (states * (1 + change)).to(states)

    with hooks((target.parts.tokens.register_forward_hook, change_last_bit)):
        if target.parts.causal and exposure.kind in ("hidden", "kv", "attention"):
            # As a search runs them: a few tokens after a cached prefix.
            branches = Branches(target.model, torch.zeros_like(ids[:, 0]))
            halves = ids.split(-(-length // 2), 1)
            rows = [rows_of(branches.go_on(exposure, half)) for half in halves]
            batch = torch.cat(rows, 1)
        else:
            batch = rows_of(capture(target.model, exposure, ids=ids))
    error = (batch - alone).norm(dim=-1) / alone.norm(dim=-1)
    known[exposure] = _MARGIN * float(error.nan_to_num(0.0).max())
    return known[exposure]


# The grids that numbers lie on.


def rounding_of(rows: Tensor, stated: str | None) -> tuple[str, Tensor]:
    """Return the name of the grid that the numbers lie on, and the step at each number."""
    numbers = rows.nan_to_num()
    for name, dtype, bits in _FLOATS:
        if stated == name or torch.equal(numbers.to(dtype).float(), numbers):
            exponent = torch.frexp(numbers.abs().clamp(min=_TINY)).exponent
            step = torch.ldexp(torch.ones_like(numbers), exponent - bits)
            info = torch.finfo(dtype)
            return name, step.clamp(min=info.smallest_normal * info.eps)
    name, floats = _scaled_floats(rows.reshape(1, -1))
    if name:
        return name, floats.view_as(rows)
    steps = _steps(rows)
    on_grid = steps > 0
    if not on_grid.any():
        return "float32", torch.zeros_like(rows)
    levels = (numbers.amax(-1) - numbers.amin(-1)) / steps.clamp(min=_TINY)
    most = float(levels.where(on_grid, 0.0).max())
    name = "int4" if most <= 15.5 else "int8"
    if most > 255.5:
        name = "rounded"
    return name, steps.unsqueeze(-1).expand_as(rows)


def _grouped(part: Tensor) -> Tensor:
    """Return the step at each number of keys or values (heads, n, k).

    The best grouping is the one with the largest share of numbers in groups that lie on
    a grid.
    """
    numbers = part.flatten()
    for groups in (1, len(part)):
        name, floats = _scaled_floats(numbers.view(groups, -1))
        if name:
            return floats.view_as(part)
    best = _FEW
    found = torch.zeros_like(numbers)
    for groups in _groupings(part):
        sample = groups[:: -(-len(groups) // _SAMPLED)]
        if not (_steps(numbers[sample]) > 0).float().mean() > best:
            continue
        own = numbers[groups]
        steps = _steps(own)
        share = float((steps > 0).float().mean()) * groups.numel() / numbers.numel()
        if share > best:
            best = share
            # two levels are one step or several
            steps = steps.where(steps > 0, own.amax(-1) - own.amin(-1))
            found = torch.zeros_like(numbers)
            found[groups] = steps[:, None].expand(groups.shape)
        if best >= _ALL:
            break
    return found.view_as(part)


def _groupings(part: Tensor) -> Iterator[Tensor]:
    """Yield ways to group the numbers of (heads, n, k), as indices (groups, size).

    Groups are whole rows, whole channels, consecutive numbers, numbers at equal
    distances, or some tokens of a channel.
    """
    heads, length, size = part.shape
    places = torch.arange(part.numel(), device=part.device)
    by_row = places.view(heads, length, size)
    yield places.view(-1, size)
    yield by_row.mT.reshape(-1, length)
    for count in _GROUPS:
        if len(places) % count == 0:
            yield places.view(-1, count)
            yield places.view(count, -1).mT
        if heads * length % count == 0:
            yield places.view(-1, count, size).mT.reshape(-1, count)
        elif whole := length // count * count:  # the last tokens are not quantised yet
            rows = by_row[:, :whole].reshape(-1, count, size)
            yield rows.mT.reshape(-1, count)


def _scaled_floats(rows: Tensor) -> tuple[str, Tensor]:
    """Return the name and the steps of groups (g, s) of 8-bit floats, each times a scale.

    The name is empty if they are none. With b bits of mantissa, a group's largest
    number is 2ᵇ⁻¹ … 2ᵇ − 1 times its step, so there are 2ᵇ⁻¹ scales to test. All whole
    numbers below 2ᵇ are such floats, too, so there must be more than 2ᵇ different
    numbers.
    """
    sizes = rows.double().nan_to_num().abs()
    top = sizes.amax(-1, keepdim=True).clamp(min=1e-300)
    normal = sizes >= _NORMAL * top
    if normal.sum(-1).min() < _ENOUGH:
        return "", sizes
    different = (sizes.sort(-1).values.diff(dim=-1) > 1e-6 * top).sum(-1).min()
    # Subnormal numbers, and those rounded to 0, have the step of the smallest number.
    least = sizes.where(sizes > 0, torch.inf).amin(-1, keepdim=True)
    least = least.where((sizes == 0).any(-1, keepdim=True), 0.0)
    for name, _, bits in _FLOATS[:2]:
        found = torch.zeros_like(sizes)
        for leading in range(2 ** (bits - 1), 2**bits) if different > 2**bits else ():
            unit = top / leading
            relative = (sizes / unit).clamp(min=_TINY) * (1 + 1e-4)
            exponent = torch.frexp(relative).exponent
            step = torch.ldexp(unit.expand_as(sizes), exponent - bits)
            off = (_distance_to_whole(sizes / step) > _NEAR) & normal
            fits = ~off.any(-1, keepdim=True)
            found = torch.where((found == 0) & fits, step.maximum(least), found)
        if (found > 0).all():
            return name, found.to(rows)
    return "", sizes


def _steps(rows: Tensor) -> Tensor:
    """Return the step (n,) of the grid that each row (n, f) lies on; 0 if it lies on none."""
    finite = rows.isfinite()
    whole = finite.all(-1)
    steps = torch.zeros_like(rows[:, 0])
    steps[whole] = _steps_of_finite(rows[whole])
    for place in indices_of(finite.any(-1) & ~whole).tolist():
        steps[place] = _steps_of_finite(rows[None, place, finite[place]])[0]
    return steps


def _steps_of_finite(rows: Tensor) -> Tensor:
    """Return the steps (n,) of rows of finite numbers, all at once.

    The usual grid is tried first: the largest number is 127 steps (or 7) from zero.
    Then any other: with few levels many numbers are equal, and the gaps between the
    rest are multiples of a step.
    """
    step = torch.zeros_like(rows[:, 0], dtype=torch.float64)
    if not len(rows) or rows.shape[1] < 8:
        return step.float()
    levels = rows.double().sort(-1).values
    largest = levels.abs().amax(-1).clamp(min=1e-300)
    gaps = levels.diff(dim=-1)
    apart = gaps > 1e-6 * largest[:, None]
    count = apart.sum(-1)
    for most in (127, 7):  # the coarser grid last: its numbers lie on the finer one too
        scaled = levels / (largest / most)[:, None]
        # numbers near 0 are one level
        different = scaled.round().diff(dim=-1).count_nonzero(-1)
        whole = _distance_to_whole(scaled).amax(-1) < _GRID
        step = torch.where(whole & (different >= _LEVELS), largest / most, step)
    least = gaps.where(apart, torch.inf).amin(-1, keepdim=True)
    each = (gaps / (gaps / least).round()).where(apart, 0.0)
    common = each.sum(-1) / count.clamp(min=1)
    multiples = (gaps / common[:, None]).where(apart, 0.0)
    fits = _distance_to_whole(multiples).amax(-1) < _GRID
    fits &= (count >= 2) & (count <= 0.9 * levels.shape[1])
    # the finer grid may fit by chance
    step = torch.where(fits, common.maximum(step), step)
    return step.where(rows.abs().amax(-1) > 0, 0.0).float()


def _distance_to_whole(numbers: Tensor) -> Tensor:
    return (numbers - numbers.round()).abs()


# A text's numbers against the leak's.


class Fit(NamedTuple):
    """The comparison of a text's own numbers with the leak's, position by position.

    `good` (positions,) is true where the difference may be the leak's error, or nothing
    leaked. `proven` says that such an agreement proves the text: the precision is
    known, or the difference looks like noise and nothing else. `residual` is the size
    of the difference and `level` that of the errors `sigma`, both relative to the
    leak's spread.
    """

    good: Tensor
    proven: bool
    residual: float
    sigma: Tensor
    level: float

    @property
    def settled(self) -> bool:
        """Whether a search can stop: all positions fit, and any noise may be believed."""
        return bool(self.good.all()) and (self.proven or self.level <= _CLAIMED)

    @property
    def whole(self) -> bool:
        """Whether the whole text is proven to be the leak's."""
        return self.settled and self.proven


def compare(
    precision: Precision,
    leaked: Tensor,
    given: Tensor,
) -> Fit:
    """Test the difference of a text's rows (positions, numbers) from the leak's.

    A number that leaked, and that the text makes NaN or infinite, is as far off as can
    be.
    """
    scale = precision.scale
    overflows = ~given.isfinite() & ~leaked.isnan()
    off = torch.where(overflows, _FAR_OFF * scale, given - leaked)
    seen = ~off.isnan().any(-1)
    residual = float(root_mean_square(off[seen])) / scale
    sigma = precision.sigma.to(off.device)
    largest = limit(off.shape[-1])
    strength = (off / sigma).square().mean(-1)
    # Errors of few levels are not spread evenly over a step: there the bound decides.
    within = (off.abs() <= precision.most.to(off.device)).all(-1)
    explained = float(strength[seen].median()) <= largest or bool(within[seen].all())
    if explained or precision.noise is not None:
        good = (strength <= largest) | within | ~seen
        return Fit(good, True, residual, sigma, precision.relative)
    # Larger than rounding explains: this is noise of unknown strength, or a wrong text.
    strength = off.square().mean(-1)
    level = float(strength[seen].median().sqrt())
    good = (strength <= largest * level**2) & (level <= NOISE * scale) | ~seen
    proven = _is_only_noise(off[seen], given[seen], level, scale)
    return Fit(good, proven, residual, sigma.clamp(min=level), level / scale)


def limit(count: int, deviations: float = _DEVIATIONS) -> float:
    """Return a bound on the mean square of `count` standard normals (Wilson & Hilferty, 1931)."""
    spread = 2 / (9 * count)
    return (1 - spread + deviations * math.sqrt(spread)) ** 3


def _is_only_noise(
    off: Tensor,
    given: Tensor,
    level: float,
    scale: float,
) -> bool:
    """Return whether a residual is independent noise of one strength, and large enough to tell.

    A wrong text, model or layer leaves traces that noise does not: a part along the
    model's own numbers (another text mixed in), a part that positions share (another
    context or model: a singular value beyond √n + √d), or numbers that are worse than
    others at every position.
    """
    rows, count = off.shape
    enough = rows * count >= _MIN_NUMBERS and rows >= _MIN_POSITIONS
    if not enough or not level <= _CLAIMED * scale:
        return False
    off = off / level
    along = float((off * given).sum() / given.norm())
    largest = float(torch.linalg.matrix_norm(off.cpu(), 2))
    columns = float(off.square().mean(0).max())
    return (
        abs(along) <= _DEVIATIONS
        and largest <= math.sqrt(rows) + math.sqrt(count) + _DEVIATIONS
        and columns <= limit(rows, _DEVIATIONS + 1)
    )
