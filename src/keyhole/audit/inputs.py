"""The input from a layer's output, the weights being public: what a debug endpoint gives away.

The auditor makes up an input, asks the endpoint for its output, and hands the attacker the layer's
weights and that output: nothing else. Because the auditor knows the input, the verdict is about
the input itself, and not merely about one that has the same output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.audit.check import Checked, Watch
from keyhole.invert import Auto, Inversion, Problem, certify
from keyhole.invert.judge import SAME
from keyhole.oracle import Oracle, OracleError, ask
from keyhole.oracle.planted import Attention
from keyhole.results import Finding, Skip, Status

LENGTH = 6  # tokens of the secret input
STARTS = 16
SECONDS = 60.0  # at most, for one leak


@dataclass(frozen=True)
class Leak:
    """One exposure: what of a layer's work is handed out, and what would stop it."""

    exposure: str
    remedy: str
    maps: bool = False
    decimals: int | None = None


_OUTPUT = "Keep the outputs of layers inside; return what is computed from the last of them."
_MAPS = "Do not return attention maps beside outputs: together they are linear equations."
_ROUNDED = "Rounding costs the attacker digits, no more: keep the outputs of layers inside."

LEAKS = (
    Leak("a layer's output", _OUTPUT),
    Leak("a layer's output to 3 decimals", _ROUNDED, decimals=3),
    Leak("a layer's output and attention maps", _MAPS, maps=True),
)


def check(surface: str, oracle: Oracle, seed: int, watch: Watch | None) -> Checked:
    """Every leak of a layer whose weights are at hand."""
    layer = _layer(oracle)
    if layer is None:
        reason = "it needs the weights of an attention layer that answers for every token"
        return Checked(skips=tuple(Skip(leak.exposure, "Auto", reason) for leak in LEAKS))
    stream = torch.Generator().manual_seed(seed ^ 0x1A9E)
    secret = _ordinary(layer, torch.randn(LENGTH, layer.dim, generator=stream, dtype=torch.float64))
    try:
        output = ask(oracle, secret.unsqueeze(0))[0]
    except OracleError:
        return Checked()  # the other family says so already
    return Checked(tuple(_run(leak, surface, layer, secret, output, seed, watch) for leak in LEAKS))


def _ordinary(layer: Attention, X: Tensor) -> Tensor:
    """The input at a size where scores have deviation 1, as in a working model."""
    deviation = float(attention.scores(X, X, layer.W).std())
    return X / max(deviation, 1e-6) ** 0.5


def _layer(oracle: Oracle) -> Attention | None:
    """The planted layer under the wrappers, if there is one that answers for every token."""
    inner: object = oracle
    while inner is not None:
        if isinstance(inner, Attention):
            return inner if inner.every_token else None
        inner = getattr(inner, "inner", None)
    return None


def _run(
    leak: Leak,
    surface: str,
    layer: Attention,
    secret: Tensor,
    output: Tensor,
    seed: int,
    watch: Watch | None,
) -> Finding:
    problem = Problem(layer.W, layer.V, output, causal=layer.causal)
    exposure = leak.exposure.replace("a layer", "a causal layer") if layer.causal else leak.exposure
    if leak.decimals is not None:
        rounded = output.round(decimals=leak.decimals)
        problem = replace(problem, B=rounded, tolerance=0.5 * 10.0**-leak.decimals)

    def notify(done: int, total: int, best: float) -> None:  # noqa: ARG001 - a residual is no count
        if watch is not None:
            watch(exposure, done, total)

    if leak.maps:
        problem = replace(problem, maps=problem.maps_of(secret))
    found = Auto(starts=STARTS, seconds=SECONDS, seed=seed)(problem, watch=notify)
    status, reason, error = _compared(found, secret, leak.decimals)
    if found.X is not None and found.solved:
        certificate = certify(problem, found.X)
        if certificate.radius is not None:
            reason += f"; proved: one exact input lies within {certificate.radius:.0e} of this one"
    return Finding(
        surface=surface,
        exposure=exposure,
        attack="Auto",
        status=status,
        reason=reason,
        remedy=leak.remedy,
        error=error,
        queries=1,
        seconds=found.seconds,
        known=1.0 if status is Status.RECOVERED else 0.0,
        sought="input",
    )


def _compared(
    found: Inversion, secret: Tensor, decimals: int | None
) -> tuple[Status, str, float | None]:
    """What was found, beside what was put in."""
    candidates = found.solutions or (() if found.X is None else (found.X,))
    if not candidates:
        return found.status, found.reason, None
    size = float(secret.abs().max())
    errors = [float((X - secret).abs().max()) / size for X in candidates]
    error = min(errors)
    if not found.solved:
        return found.status, found.reason, error
    place = errors.index(error) + 1
    among = f"number {place} of {len(errors)} inputs with this output is the one put in"
    if len(errors) == 1:
        among = "it is the one put in"
    if error <= SAME:
        return Status.RECOVERED, f"{found.reason}; {among}", error
    if decimals is not None and error <= 1e-1:
        return Status.INEXACT, f"{found.reason}; {among}, but for what rounding hid", error
    return (
        Status.NOT_IDENTIFIABLE,
        f"{found.reason}; none of the {len(errors)} found is the one put in",
        error,
    )
