"""The input from a layer's output, the weights being public: what a debug endpoint gives away.

The auditor makes up an input, asks the endpoint for its output, and hands the attacker the layer's
weights and that output: nothing else. Because the auditor knows the input, the verdict is about
the input itself, and not merely about one that has the same output.

Which leaks are tried with which method stands in invert/registry.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from keyhole import attention
from keyhole.audit.check import Check, Checked, nothing_to_try
from keyhole.core import Finding, Skip, Status
from keyhole.core.errors import MissingExtra
from keyhole.core.progress import Track
from keyhole.invert import Inversion, Problem, certify
from keyhole.invert.judge import SAME
from keyhole.invert.registry import METHODS, Line
from keyhole.invert.solvers.multistart import Solve
from keyhole.oracle import Oracle, OracleError, ask
from keyhole.oracle.planted import Attention

LENGTH = 6  # tokens of the secret input
_WEIGHT = 6  # how long a check takes, as measured on the demo (check.py)


def checks(surface: str, oracle: Oracle, seed: int) -> list[Check]:
    """Every leak of a layer whose weights are at hand."""
    attacks = [
        (f"input from {line.exposure}, {entry.name}", line,
         METHODS.make(entry.name, seed=seed, **line.settings))
        for entry, line in METHODS.lines()
    ]  # fmt: skip
    layer = _layer(oracle)
    if layer is None:
        reason = "it needs the weights of an attention layer that answers for every token"
        return [
            nothing_to_try(name, Skip(line.exposure, type(method).__name__, reason))
            for name, line, method in attacks
        ]
    leak = cache(partial(_leak, layer, oracle, seed))
    return [
        Check(name, partial(_check, line, method, surface, layer, leak), weight=_WEIGHT)
        for name, line, method in attacks
    ]


def _leak(layer: Attention, oracle: Oracle, seed: int) -> tuple[Tensor, Tensor]:
    """An input made up by the auditor, and what the endpoint answers to it."""
    stream = torch.Generator().manual_seed(seed ^ 0x1A9E)
    secret = _ordinary(layer, torch.randn(LENGTH, layer.dim, generator=stream, dtype=torch.float64))
    return secret, ask(oracle, secret.unsqueeze(0))[0]


def _check(
    line: Line,
    method: Solve,
    surface: str,
    layer: Attention,
    leak: Callable[[], tuple[Tensor, Tensor]],
    track: Track,
) -> Checked:
    try:
        secret, output = leak()
    except OracleError as error:
        skip = Skip(line.exposure, type(method).__name__, str(error), unchecked=True)
        return Checked(skips=(skip,))
    return Checked((_run(line, method, surface, layer, secret, output, track),))


def _ordinary(layer: Attention, X: Tensor) -> Tensor:
    """The input at a size where scores have deviation 1, as in a working model."""
    deviation = float(attention.scores(X, X, layer.W).std())
    return X / max(deviation, 1e-6) ** 0.5


def _proof(problem: Problem, X: Tensor) -> str:
    """What can be proved of an input, in words; a proof that cannot be made is not the end."""
    try:
        certificate = certify(problem, X)
    except MissingExtra as missing:
        return f"; not proved: {missing}"
    if certificate.radius is None:
        return ""
    return f"; proved: one exact input lies within {certificate.radius:.0e} of this one"


def _layer(oracle: Oracle) -> Attention | None:
    """The planted layer under the wrappers, if there is one that answers for every token."""
    inner: object = oracle
    while inner is not None:
        if isinstance(inner, Attention):
            return inner if inner.every_token else None
        inner = getattr(inner, "inner", None)
    return None


def _run(
    line: Line,
    method: Solve,
    surface: str,
    layer: Attention,
    secret: Tensor,
    output: Tensor,
    track: Track,
) -> Finding:
    problem = _problem(line, layer, secret, output)
    exposure = line.exposure.replace("a layer", "a causal layer") if layer.causal else line.exposure
    inversion = method(problem, progress=track(exposure))
    status, reason, error = _compared(inversion, secret, line.decimals)
    if inversion.X is not None and inversion.solved:
        reason += _proof(problem, inversion.X)
    return Finding(
        surface=surface,
        exposure=exposure,
        attack=type(method).__name__,
        status=status,
        reason=reason,
        remedy=line.remedy,
        error=error,
        queries=1,
        seconds=inversion.seconds,
        known=1.0 if status is Status.RECOVERED else 0.0,
        sought="input",
    )


def _problem(line: Line, layer: Attention, secret: Tensor, output: Tensor) -> Problem:
    """What the attacker has: the layer, its output as it leaks, and the maps where they do."""
    problem = Problem(layer.W, layer.V, output, causal=layer.causal)
    if line.decimals is not None:
        rounded = output.round(decimals=line.decimals)
        problem = replace(problem, B=rounded, tolerance=0.5 * 10.0**-line.decimals)
    return replace(problem, maps=problem.maps_of(secret)) if line.maps else problem


def _compared(
    inversion: Inversion, secret: Tensor, decimals: int | None
) -> tuple[Status, str, float | None]:
    """The inversion beside what was put in."""
    candidates = inversion.solutions or (() if inversion.X is None else (inversion.X,))
    if not candidates:
        return inversion.status, inversion.reason, None
    size = float(secret.abs().max())
    errors = [float((X - secret).abs().max()) / size for X in candidates]
    error = min(errors)
    if not inversion.solved:
        return inversion.status, inversion.reason, error
    place = errors.index(error) + 1
    among = f"number {place} of {len(errors)} inputs with this output is the one put in"
    if len(errors) == 1:
        among = "it is the one put in"
    if error <= SAME:
        return Status.RECOVERED, f"{inversion.reason}; {among}", error
    if decimals is not None and error <= 1e-1:
        return Status.INEXACT, f"{inversion.reason}; {among}, but for what rounding hid", error
    return (
        Status.NOT_IDENTIFIABLE,
        f"{inversion.reason}; none of the {len(errors)} found is the one put in",
        error,
    )
