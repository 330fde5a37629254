"""Nonlinear least squares, batched over starts: Levenberg–Marquardt and Gauss–Newton.

    minimise ‖r(x)‖²        by steps p that minimise        ‖r + Jp‖² + λ‖Dp‖²

(Levenberg 1944, Marquardt 1963). λ, the damping, falls after a step that lowers the loss and grows
after any other, which is not taken. Every start has its own λ and leaves the batch once it has
finished. What differs from use to use is a parameter:

    derivative    a `Point` holds r, and J, JᵀJ or products with J, whatever is known in closed form
    solver        `cholesky`, `qr`, `newton` or `conjugate_gradients`, with D for the first two
    acceleration  the step follows the curve of the model to second order (Transtrum and Sethna,
                  arXiv 1207.4999): p + a/2, where a takes the place of p and ∂²r/∂p² that of r
    stop rules    those of `Options`

A regulariser γ‖x‖² is √γ·x as further residuals (`Regularised`). Tensors stay on the
device of the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float64).eps


class Point:
    """Residuals r (b, m) at x (b, …), one row for each start, and their derivative J (b, m, n).

    J is computed only if a step is taken from here. A subclass may know JᵀJ, or the products with J
    and Jᵀ, without J.
    """

    def __init__(
        self,
        x: Tensor,
        residuals: Tensor,
        jacobian: Callable[[], Tensor] | None = None,
    ) -> None:
        self.x = x
        self.residuals = residuals.flatten(1)
        self.loss = self.residuals.square().sum(1)
        self._jacobian = jacobian

    @cached_property
    def jacobian(self) -> Tensor:
        if self._jacobian is None:
            raise NotImplementedError
        return self._jacobian()

    @cached_property
    def normal(self) -> Tensor:
        """JᵀJ (b, n, n)."""
        return self.jacobian.mT @ self.jacobian

    def forward(self, p: Tensor) -> Tensor:
        """Return Jp (b, m)."""
        return (self.jacobian @ p.unsqueeze(-1)).squeeze(-1)

    def backward(self, r: Tensor) -> Tensor:
        """Return Jᵀr (b, n)."""
        return (self.jacobian.mT @ r.unsqueeze(-1)).squeeze(-1)

    def moved(self, p: Tensor) -> Tensor:
        """Return x after the step p (b, n)."""
        return self.x + p.view_as(self.x)


class Regularised(Point):
    """A point with √γ·x as further residuals, so that the loss is ‖r‖² + γ‖x‖².

    γ is a number, or (b, 1) or (b, n): one for each start, or for each unknown too.
    """

    def __init__(self, inner: Point, weight: Tensor | float) -> None:
        x = inner.x.flatten(1)
        self.inner = inner
        self.root = torch.as_tensor(weight).to(x).sqrt().expand_as(x)
        super().__init__(inner.x, torch.cat([inner.residuals, self.root * x], 1))

    @cached_property
    def jacobian(self) -> Tensor:
        return torch.cat([self.inner.jacobian, torch.diag_embed(self.root)], 1)

    @cached_property
    def normal(self) -> Tensor:
        return self.inner.normal + torch.diag_embed(self.root.square())

    def forward(self, p: Tensor) -> Tensor:
        return torch.cat([self.inner.forward(p), self.root * p], 1)

    def backward(self, r: Tensor) -> Tensor:
        own, pull = r.split([r.shape[1] - self.root.shape[1], self.root.shape[1]], 1)
        return self.inner.backward(own) + self.root * pull


# The problem, as a function of x (b, …) and of the numbers (b,) of the starts it is for.
Linearize = Callable[[Tensor, Tensor], Point]
# A damping (b,) gives a function from residuals r to the step p that undoes them.
Solve = Callable[[Tensor], Tensor]
Damped = Callable[[Tensor], Solve]


def diagonal(point: Point) -> Tensor:
    """Return Marquardt's D²: the diagonal of JᵀJ, so that the units of unknowns do not matter."""
    squares = point.normal.diagonal(dim1=-2, dim2=-1)
    return squares.clamp(min=1e-12 * squares.amax(-1, keepdim=True).clamp(min=1e-300))


def mean(point: Point) -> Tensor:
    """Return Levenberg's D²: the same for all unknowns, if these are of one kind."""
    squares = point.normal.diagonal(dim1=-2, dim2=-1)
    return squares.mean(-1, keepdim=True).clamp(min=1e-300)


def cholesky(point: Point, scale: Callable[[Point], Tensor] = diagonal) -> Damped:
    """Solve the normal equations (JᵀJ + λD²)p = −Jᵀr.

    They square the condition of J, and the next step makes up for the digits that this costs.
    """
    weights = scale(point)

    def damped(damping: Tensor) -> Solve:
        normal = point.normal.clone()
        normal.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(-1) * weights)
        factor = torch.linalg.cholesky_ex(normal)[0]
        return lambda r: (
            -torch.cholesky_solve(point.backward(r).unsqueeze(-1), factor).squeeze(-1)
        )

    return damped


def qr(point: Point) -> Damped:
    """Solve without squaring the condition: the rows √λ·D are put below J. D as in `diagonal`."""
    J = point.jacobian
    size = torch.linalg.vector_norm(J, dim=1).clamp(min=1e-12)
    scaled = J / size.unsqueeze(1)
    identity = torch.eye(J.shape[2], dtype=J.dtype, device=J.device).expand(
        len(J), -1, -1
    )

    def damped(damping: Tensor) -> Solve:
        Q, R = torch.linalg.qr(
            torch.cat([scaled, damping.sqrt()[:, None, None] * identity], 1)
        )
        top = Q[:, : J.shape[1]].mT

        def solve(r: Tensor) -> Tensor:
            p = torch.linalg.solve_triangular(
                R, top @ r.unsqueeze(-1), upper=True
            ).squeeze(-1)
            return -p / size

        return solve

    return damped


def newton(point: Point) -> Damped:
    """Take Gauss–Newton's step of least norm, Newton's if J is regular, divided by λ."""
    J = point.jacobian
    r = point.residuals.unsqueeze(-1)
    if J.shape[1] == J.shape[2]:
        step, failed = torch.linalg.solve_ex(J, r)
        if not bool(failed.any()):
            return divided(-step.squeeze(-1))
    step = torch.linalg.pinv(J, rtol=1e-12) @ r
    return divided(-step.squeeze(-1))


def divided(step: Tensor) -> Damped:
    """Return the step divided by λ, which is 1 for the whole step."""
    return lambda damping: lambda _: step / damping.unsqueeze(-1)


Product = Callable[[Tensor], Tensor]


def conjugate_gradients(
    forward: Product,
    backward: Product,
    r: Tensor,
    *,
    rtol: Tensor | float,
    max_steps: int,
    weight: Tensor | float = 0.0,
    precondition: Product = torch.clone,
) -> Tensor:
    """Return `argmin ‖Jp + r‖² + weight·‖p‖²` from products with J and Jᵀ alone, for r (b, m).

    Hestenes and Stiefel's form for least squares does not square the rounding of the residuals. A
    row ends when its gradient, in the norm of the preconditioner, is at most `rtol` of the first.
    """
    weight = torch.as_tensor(weight, dtype=r.dtype, device=r.device).reshape(-1, 1)
    slope = -backward(r)
    p = torch.zeros_like(slope)
    direction = precondition(slope)
    size = (slope * direction).sum(1)
    least = rtol * rtol * size
    for _ in range(max_steps):
        running = size > least
        if not bool(running.any()):
            break
        image = forward(direction)
        curvature = image.square().sum(1) + (weight * direction.square()).sum(1)
        length = torch.where(
            running, size / curvature.clamp(min=1e-300), 0.0
        ).unsqueeze(1)
        p = p + length * direction
        r = r + length * image
        slope = -backward(r) - weight * p
        solved = precondition(slope)
        before, size = size, (slope * solved).sum(1)
        direction = solved + (size / before.clamp(min=1e-300)).unsqueeze(1) * direction
    return p


@dataclass(frozen=True)
class Options:
    """When steps are damped, and when a start has finished.

    A start has finished when its loss is at most `target`; when a step of no more than the first
    damping gains less than `rtol` of the loss; when the loss is at most `floor`, where it consists
    of rounding, and a step gains less than three quarters; when a step is too short to change x;
    when its damping exceeds `most`; or when `patience` steps have left more than `stalled`
    of the loss.
    """

    max_steps: int = 100
    solver: Callable[[Point], Damped] = cholesky
    damping: float = 1e-3
    shrink: float = 5.0  # λ falls by this factor after a step that lowers the loss,
    grow: float = 4.0  # and grows by this one after any other
    least: float = 1e-16
    most: float = 1e12
    accelerate: bool = False
    rtol: float = 0.0
    target: float = 0.0
    floor: float = 0.0
    patience: int = 0
    stalled: float = 0.8


# Whole Newton steps, as long as each of them lowers the loss.
NEWTON = Options(solver=newton, damping=1.0, least=1.0, most=1.0)


@dataclass(frozen=True, eq=False)
class Search:
    """The state of a batch of starts: the best x of each, its damping, and who has finished."""

    linearize: Linearize
    options: Options
    rows: Tensor  # the numbers of the starts that are left in the batch
    x: Tensor
    loss: Tensor
    damping: Tensor
    finished: Tensor
    mark: Tensor  # the loss when patience began
    steps: int = 0
    point: Point | None = None  # at x, if known
    damped: Damped | None = None  # the solver at x, if known

    @classmethod
    def begin(
        cls,
        linearize: Linearize,
        start: Tensor,
        options: Options,
    ) -> Search:
        rows = torch.arange(len(start), device=start.device)
        point = linearize(start, rows)
        loss = point.loss
        finished = ~(loss > options.target) | ~loss.isfinite()
        damping = torch.full_like(loss, options.damping)
        return cls(
            linearize, options, rows, start, loss, damping, finished, loss, point=point
        )

    def step(self) -> Search:
        """Try one step of every start, and take those that lower the loss."""
        options = self.options
        here = self.point or self.linearize(self.x, self.rows)
        damped = self.damped or options.solver(here)
        solve = damped(self.damping)
        p = solve(here.residuals)
        if options.accelerate:
            p = self._accelerated(here, solve, p)
        trial = self.linearize(here.moved(p), self.rows)
        improved = trial.loss < self.loss
        wide = improved.view(-1, *(1,) * (self.x.ndim - 1))
        loss = torch.where(improved, trial.loss, self.loss)
        shrunk = (self.damping / options.shrink).clamp(min=options.least)
        damping = torch.where(improved, shrunk, self.damping * options.grow)
        finished = self._stops(p, improved, loss) | (damping > options.most)
        mark = self.mark
        steps = self.steps + 1
        if options.patience and steps % options.patience == 0:
            finished = finished | (loss > options.stalled * mark)
            mark = loss
        point = None
        if bool(improved.all()):
            point = trial
        elif not bool(improved.any()):
            point = here
        return replace(
            self,
            x=torch.where(wide, trial.x, self.x),
            loss=loss,
            damping=damping,
            finished=finished,
            mark=mark,
            steps=steps,
            point=point,
            damped=damped if point is here else None,
        )

    def _accelerated(
        self,
        here: Point,
        solve: Solve,
        p: Tensor,
    ) -> Tensor:
        """Add half of the second-order step where it is short enough to be trusted."""
        h = 0.1
        ahead = self.linearize(here.moved(h * p), self.rows)
        bend = ((ahead.residuals - here.residuals) / h - here.forward(p)) * (2 / h)
        a = solve(bend)
        size = torch.linalg.vector_norm(p, dim=1)
        short = 2 * torch.linalg.vector_norm(a, dim=1) < 0.75 * size
        return torch.where(short.unsqueeze(1), p + a / 2, p)

    def _stops(
        self,
        p: Tensor,
        improved: Tensor,
        loss: Tensor,
    ) -> Tensor:
        options = self.options
        size = self.x.flatten(1).abs().amax(1)
        still = ~improved & (p.abs().amax(1) <= _EPS * size)
        finished = still | (loss <= options.target)
        if options.rtol:
            whole = self.damping <= options.damping
            small = improved & whole & (loss > (1 - options.rtol) * self.loss)
            finished = finished | small
        if options.floor:
            small = (self.loss <= options.floor) & (loss > 0.25 * self.loss)
            finished = finished | small
        return finished

    def keep(self, chosen: Tensor) -> Search:
        """Return the search of the starts that are `chosen` (b,)."""
        if bool(chosen.all()):
            return self
        return replace(
            self,
            rows=self.rows[chosen],
            x=self.x[chosen],
            loss=self.loss[chosen],
            damping=self.damping[chosen],
            finished=self.finished[chosen],
            mark=self.mark[chosen],
            point=None,
            damped=None,
        )


def all_finished(finished: Tensor, loss: Tensor) -> bool:
    del loss
    return bool(finished.all())


def minimize(
    linearize: Linearize,
    start: Tensor,
    options: Options,
    stop: Callable[[Tensor, Tensor], bool] = all_finished,
) -> tuple[Tensor, Tensor]:
    """Return where the starts (b, …) end, and the loss ‖r‖² there.

    The search ends when `stop(finished, loss)` says so, or after `options.max_steps`.
    """
    search = Search.begin(linearize, start, options)
    x, loss, finished = search.x.clone(), search.loss.clone(), search.finished.clone()
    for _ in range(options.max_steps):
        if stop(finished, loss):
            break
        search = search.keep(~search.finished).step()
        x[search.rows] = search.x
        loss[search.rows] = search.loss
        finished[search.rows] = search.finished
    return x, loss
