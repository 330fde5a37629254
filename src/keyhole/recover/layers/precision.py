"""How exact a leak is, found out from its own numbers.

A leaked number is y = f + ε. Rounding leaves a grid in y: bfloat16 and float16 have few bits of
mantissa, integers one step a row (int8 with a scale for each token, decimals, …). Then ε is uniform
over a step: variance step²/12. Noise leaves no trace in y; it shows in the residual of the right
text, and only there (see judge.py).

Quantised caches have a grid for each group of numbers, and which numbers make a group is the
program's choice: a token's numbers of a head (KIVI's values), a channel's over some tokens (KIVI's
keys; arXiv 2402.02750), all of a tensor (fp8). Nobody says which, so every usual way to group them
is tried, and one in which all groups lie on grids is the right one: by chance none does.

Arithmetic is not exact either: two machines, or two sizes of a batch, add up in different orders.
In float32 that hardly shows; in bfloat16 and float16 it does, and large random weights enlarge it
from layer to layer. So it is measured (`rounding_error`): random texts are run one at a time, and
again several at once with their embeddings off in the last bit. What that moves a row by, the right
text may differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture, hooks
from keyhole.recover.attack import Target
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import Leak, rows_of

FLOAT32 = 3e-5  # of the leak's root mean square: what float32 may differ by between machines
_FLOATS = (  # of few bits, the coarsest first; bits count the leading one
    ("float8_e5m2", torch.float8_e5m2, 3),
    ("float8_e4m3fn", torch.float8_e4m3fn, 4),
    ("bfloat16", torch.bfloat16, 8),
    ("float16", torch.float16, 11),
)
_GROUPS = (128, 64, 32, 16)  # numbers that share a scale
_SEEN = 64  # groups that show whether the others are worth looking at
_ENOUGH = 32  # numbers that cannot lie on a grid by chance
_NEAR = 0.05  # of a step: what 8-bit floats times a scale may be off after another rounding
_NORMAL = 2.0**-4  # of the largest number: such ones are no subnormal 8-bit floats
_ALL = 0.95  # of a tensor's groups on a grid: a few may be alike in all their numbers
_LEVELS = 4  # more than so many lie on a grid of 127 steps by chance too seldom
_GRID = 5e-3  # how far from a whole multiple of the step a number may lie, in steps
_DEVIATIONS = 4.5  # standard deviations that chance is granted
NOISE = 0.5  # of the leak's spread: noise above it may be a misfit as well
_CLAIMED = 0.15  # of the leak's spread: unknown noise above it is never vouched for
_TEXTS, _LENGTH = 4, 32  # random ones that the arithmetic is measured on
_MARGIN = 1.5  # above the largest error of their positions
_FEW = 4  # positions, …
_NUMBERS = 2000  # … and numbers, without which unknown noise proves nothing


@dataclass(frozen=True, eq=False)
class Precision:
    """`rounding` (positions, numbers): the standard deviation of each number's error but for noise.

    `noise` is the size of that, where it is stated. `scale` is the root mean square of the leak
    around its mean: the unit of relative figures. No error is larger than `most` (positions,
    numbers) where the leak is only rounded.
    """

    name: str
    rounding: Tensor
    scale: float
    noise: float | None
    most: Tensor

    @cached_property
    def sigma(self) -> Tensor:
        """The standard deviation (positions, numbers) of each leaked number's own error."""
        return (self.rounding.square() + (self.noise or 0.0) ** 2).sqrt()

    @property
    def relative(self) -> float:
        """The error that the numbers themselves admit, relative to the leak's spread."""
        return float(self.sigma.square().nanmean().sqrt()) / self.scale


def precision_of(leak: Leak, arithmetic: float = 0.0) -> Precision:
    """The rounding of a leak: from its numbers, and its stated noise on top.

    `arithmetic` is the model's own rounding error, as a share of each row's root mean square.
    """
    rows = leak.rows(leak.tensors).float()
    own = arithmetic * rows.square().nanmean(-1, keepdim=True).sqrt().nan_to_num(0.0)
    seen = rows[rows.isfinite()]
    scale = float((seen - seen.mean()).square().mean().sqrt().clamp(min=1e-30))
    least = FLOAT32 * float(seen.square().mean().sqrt())
    name, step = rounding_of(rows, leak.precision)
    if name == "float32" and leak.rank > 2:  # heads may have a scale each, or other groups
        each = {name: _grouped(part) for name, part in leak.tensors.items()}
        step = leak.rows({name: steps for name, (_, steps) in each.items()})
        name = min(grid for grid, _ in each.values())
    rounding = (step.square() / 12 + own.square() + least**2).sqrt()
    others = (own.square() + least**2 + (leak.noise or 0.0) ** 2).sqrt()
    return Precision(name, rounding, scale, leak.noise, step / 2 + _DEVIATIONS * others)


def rounding_error(target: Target, exposure: Exposure) -> float:
    """How far a row moves where the model's arithmetic rounds otherwise, relative to its size.

    The largest error of a position, as a root mean square over its numbers, and a margin.
    """
    known = target.remembered("rounding", None, dict[Exposure, float])
    if exposure not in known:
        known[exposure] = _rounding_error(target, exposure)
    return known[exposure]


@torch.no_grad()
def _rounding_error(target: Target, exposure: Exposure) -> float:
    length = min(_LENGTH, target.parts.max_length)
    stream = torch.Generator().manual_seed(0)
    ids = random_texts(target, _TEXTS, length, stream).to(target.parts.device)
    alone = torch.cat([rows_of(capture(target.model, exposure, ids=text[None])) for text in ids])

    def in_the_last_bit(_m: nn.Module, _i: Any, words: Tensor) -> Tensor:
        off = torch.finfo(words.dtype).eps * (2 * torch.rand(words.shape, generator=stream) - 1)
        return (words * (1 + off.to(words.device))).to(words)

    with hooks((target.parts.tokens.register_forward_hook, in_the_last_bit)):
        if target.parts.causal and exposure.kind in ("hidden", "kv", "attention"):
            several = _by_halves(target, exposure, ids)
        else:
            several = rows_of(capture(target.model, exposure, ids=ids))
    error = (several - alone).norm(dim=-1) / alone.norm(dim=-1)
    return _MARGIN * float(error.nan_to_num(0.0).max())


def _by_halves(target: Target, exposure: Exposure, ids: Tensor) -> Tensor:
    """Rows of texts (b, n) as a search computes them: a few tokens behind a prefix that is kept."""
    branches = Branches(target.model, torch.zeros_like(ids[:, 0]))
    halves = ids.split(-(-ids.shape[1] // 2), 1)
    return torch.cat([rows_of(branches.go_on(exposure, half)) for half in halves], 1)


def rounding_of(rows: Tensor, stated: str | None) -> tuple[str, Tensor]:
    """The name of the grid that the numbers lie on, and the step at each of them."""
    numbers = rows.nan_to_num()
    for name, dtype, bits in _FLOATS:
        if stated == name or torch.equal(numbers.to(dtype).float(), numbers):
            exponent = torch.frexp(numbers.abs().clamp(min=1e-30)).exponent
            least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            return name, torch.ldexp(torch.ones_like(numbers), exponent - bits).clamp(min=least)
    name, floats = _scaled_floats(rows.reshape(1, -1))
    if name:
        return name, floats.view_as(rows)
    steps = _steps(rows)
    if bool((steps > 0).any()):
        return _integers(rows, steps), steps.unsqueeze(-1).expand_as(rows)
    return "float32", torch.zeros_like(rows)


def _integers(rows: Tensor, steps: Tensor) -> str:
    """What whole numbers of steps (n,) in rows (n, f) are called."""
    numbers = rows.nan_to_num()
    levels = (numbers.amax(-1) - numbers.amin(-1)) / steps.clamp(min=1e-30)
    most = float(torch.where(steps > 0, levels, 0.0).max())
    return "int4" if most <= 15.5 else "int8" if most <= 255.5 else "rounded"


def _grouped(part: Tensor) -> tuple[str, Tensor]:
    """The same for keys or values (heads, n, k) whose scales are of groups of numbers."""
    numbers = part.flatten()
    for groups in (1, len(part)):
        name, floats = _scaled_floats(numbers.view(groups, -1))
        if name:
            return name, floats.view_as(part)
    best, name, found = 0.0, "float32", torch.zeros_like(numbers)
    for groups in _groupings(part):
        few = groups[:: -(-len(groups) // _SEEN)]
        if not float((_steps(numbers[few]) > 0).float().mean()) > best:
            continue
        steps = _steps(numbers[groups])
        share = float((steps > 0).float().mean()) * groups.numel() / numbers.numel()
        if share > best:
            best, name = share, _integers(numbers[groups], steps)
            spread = numbers[groups].amax(-1) - numbers[groups].amin(-1)
            steps = torch.where(steps > 0, steps, spread)  # two levels alone: a step or several
            found = torch.zeros_like(numbers)
            found[groups] = steps[:, None].expand(groups.shape)
        if best >= _ALL:
            break
    return name, found.view_as(part)


def _groupings(part: Tensor) -> Iterator[Tensor]:
    """Ways to group the numbers of (heads, n, k): their places (groups, size), whole rows first.

    Some of each head's numbers in a row, of a channel over tokens, or every so many'th of all.
    """
    heads, length, size = part.shape
    places = torch.arange(part.numel(), device=part.device)
    yield places.view(-1, size)
    yield places.view(heads, length, size).mT.reshape(-1, length)
    for count in _GROUPS:
        if len(places) % count == 0:
            yield places.view(-1, count)
            yield places.view(count, -1).mT
        if heads * length % count == 0:
            yield places.view(-1, count, size).mT.reshape(-1, count)
        elif whole := length // count * count:  # the rest is not quantised yet
            rows = places.view(heads, length, size)[:, :whole]
            yield rows.reshape(-1, count, size).mT.reshape(-1, count)


def _scaled_floats(rows: Tensor) -> tuple[str, Tensor]:
    """Groups (g, s) that are 8-bit floats times a scale each: their name and steps, or no name.

    A group's largest number is 2ᵇ⁻¹ … 2ᵇ − 1 times its step, which gives as many scales to test.
    Whole numbers below 2ᵇ are such floats as well: there must be more than so many different ones.
    """
    sizes = rows.double().nan_to_num().abs()
    top = sizes.amax(-1, keepdim=True).clamp(min=1e-300)
    normal = sizes >= _NORMAL * top
    count = (sizes.sort(-1).values.diff(dim=-1) > 1e-6 * top).sum(-1).min()
    if int(normal.sum(-1).min()) < _ENOUGH:
        return "", sizes
    # Subnormal numbers, and what was rounded to 0, have the step of the smallest there is.
    least = sizes.where(sizes > 0, torch.inf).amin(-1, keepdim=True)
    least = least.where((sizes == 0).any(-1, keepdim=True), 0.0)
    for name, _, bits in _FLOATS[:2]:
        found = torch.zeros_like(sizes)
        for leading in range(2 ** (bits - 1), 2**bits) if count > 2**bits else ():
            unit = top / leading
            exponent = torch.frexp((sizes / unit).clamp(min=1e-30) * (1 + 1e-4)).exponent
            step = torch.ldexp(unit.expand_as(sizes), exponent - bits)
            whole = sizes / step
            off = ((whole - whole.round()).abs() > _NEAR) & normal
            fits = ~off.any(-1, keepdim=True)
            found = torch.where((found == 0) & fits, step.maximum(least), found)
        if bool((found > 0).all()):
            return name, found.to(rows)
    return "", sizes


def _steps(rows: Tensor) -> Tensor:
    """The step of the grid that each row (n, f) lies on; 0 where it lies on none."""
    whole = rows.isfinite().all(-1)
    steps = torch.zeros(len(rows), device=rows.device)
    steps[whole] = _step(rows[whole])
    for place in (rows.isfinite().any(-1) & ~whole).nonzero().flatten().tolist():
        row = rows[place]
        steps[place] = _step(row[row.isfinite()][None])[0]
    return steps


def _step(rows: Tensor) -> Tensor:
    """The same for rows without gaps, all at once: a text may have a thousand.

    First the usual one: the largest number is 127 steps (or 7) from zero. Then any other: with few
    levels many numbers meet exactly, and all gaps between the rest are whole multiples of one step.
    """
    step = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    if not len(rows) or rows.shape[1] < 8:
        return step.float()
    levels = rows.double().sort(-1).values
    largest = levels.abs().amax(-1).clamp(min=1e-300)
    gaps = levels.diff(dim=-1)
    apart = gaps > 1e-6 * largest[:, None]
    count = apart.sum(-1)
    for most in (127, 7):  # the coarser one last: it is the finer one's as well
        fits = _whole(levels / (largest / most)[:, None]) & (count >= _LEVELS)
        step = torch.where(fits, largest / most, step)
    least = gaps.where(apart, torch.inf).amin(-1, keepdim=True)
    each = (gaps / (gaps / least).round()).where(apart, 0.0)
    common = each.sum(-1) / count.clamp(min=1)
    fits = _whole((gaps / common[:, None]).where(apart, 0.0))
    fits &= (count >= 2) & (count <= 0.9 * levels.shape[1])
    step = torch.where(fits, common.maximum(step), step)  # the finer one may fit by chance
    return step.where(rows.abs().amax(-1) > 0, 0.0).float()


def _whole(numbers: Tensor) -> Tensor:
    return (numbers - numbers.round()).abs().amax(-1) < _GRID


@dataclass(frozen=True, eq=False)
class Fit:
    """How a text's own numbers compare with the leak's, position by position.

    `good` (positions,) is true where the difference may be the leak's error, or nothing leaked.
    `proven` says that the difference was tested hard enough for a claim: against a known precision,
    or as noise that nothing but noise looks like.
    """

    good: Tensor
    proven: bool
    residual: float
    sigma: Tensor
    level: float

    @property
    def settled(self) -> bool:
        """Nothing is left that a search could improve on, nor noise that nobody vouches for."""
        return bool(self.good.all()) and (self.proven or self.level <= _CLAIMED)

    @property
    def whole(self) -> bool:
        return self.settled and self.proven


def compare(precision: Precision, leaked: Tensor, given: Tensor) -> Fit:
    """Test a residual against a leak's precision; rows are positions."""
    off = given - leaked
    seen = ~off.isnan().any(-1)
    residual = float(off[seen].square().mean().sqrt()) / precision.scale
    sigma = precision.sigma.to(off.device)
    most = limit(off.shape[-1])
    strength = (off / sigma).square().mean(-1)
    typical = float(strength[seen].median())
    # Numbers of few steps are not spread quite evenly over one: the bound decides for them.
    within = (off.abs() <= precision.most.to(off.device)).all(-1)
    if typical <= most or bool(within[seen].all()) or precision.noise is not None:
        good = (strength <= most) | within | ~seen
        return Fit(good, True, residual, sigma, precision.relative)
    # Larger than rounding explains: noise of unknown strength, or a wrong text.
    strength = off.square().mean(-1)
    level = float(strength[seen].median().sqrt())
    good = (strength <= most * level**2) & (level <= NOISE * precision.scale) | ~seen
    proven = _only_noise(off[seen], given[seen], level, precision.scale)
    return Fit(good, proven, residual, sigma.clamp(min=level), level / precision.scale)


def limit(count: int, deviations: float = _DEVIATIONS) -> float:
    """A bound on the mean of so many squared standard normals (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * count)
    return (1 - spread + deviations * math.sqrt(spread)) ** 3


def _only_noise(off: Tensor, given: Tensor, level: float, scale: float) -> bool:
    """Is the residual independent noise of one strength, and long enough to tell?

    A leak that is not what it says leaves traces that noise does not: a part along what the model
    gives (another text mixed in), a part that positions share (another context or model: a singular
    value beyond √n + √d), numbers that are worse than others at every position.
    """
    rows, count = off.shape
    if rows * count < _NUMBERS or rows < _FEW or not level <= _CLAIMED * scale:
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
