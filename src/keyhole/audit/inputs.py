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
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.invert import Inversion, Problem, certify
from keyhole.invert.judge import SAME
from keyhole.invert.registry import METHODS, Row
from keyhole.invert.solvers.multistart import Solve
from keyhole.oracle import Oracle, OracleError, ask
from keyhole.oracle.planted import Attention
from keyhole.report import words

LENGTH = 6  # tokens of the secret input
_WEIGHT = 2.5  # seconds that a check takes, as measured on the demo


def checks(part: str, oracle: Oracle, seed: int) -> list[Check]:
    """Every leak of a layer whose weights are at hand."""
    attacks = [
        (entry.name, row, METHODS.make(entry.name, seed=seed, **row.settings))
        for entry, row in METHODS.rows()
    ]
    layer = _layer(oracle)
    if layer is None:
        reason = "it needs the weights of an attention layer that answers for every token"
        return [
            nothing_to_try(Skip(row.exposure, type(method).__name__, reason))
            for _, row, method in attacks
        ]
    leak = cache(partial(_leak, layer, oracle, seed))
    made: list[Check] = []
    for name, row, method in attacks:
        variant = row.exposure.variant or ("causal" if layer.causal else "")
        exposure = replace(row.exposure, variant=variant, part=part)
        run = partial(_check, row, method, exposure, layer, leak)
        made.append(Check(exposure, run, name, weight=_WEIGHT))
    return made


def _leak(layer: Attention, oracle: Oracle, seed: int) -> tuple[Tensor, Tensor]:
    """An input made up by the auditor, and what the endpoint answers to it."""
    stream = torch.Generator().manual_seed(seed ^ 0x1A9E)
    secret = _ordinary(layer, torch.randn(LENGTH, layer.dim, generator=stream, dtype=torch.float64))
    return secret, ask(oracle, secret.unsqueeze(0))[0]


def _check(
    row: Row,
    method: Solve,
    exposure: Exposure,
    layer: Attention,
    leak: Callable[[], tuple[Tensor, Tensor]],
    track: Track,
) -> Checked:
    try:
        secret, output = leak()
    except OracleError as error:
        skip = Skip(row.exposure, type(method).__name__, str(error), unchecked=True)
        return Checked(skips=(skip,))
    return Checked((_run(row, method, exposure, layer, secret, output, track),))


def _ordinary(layer: Attention, X: Tensor) -> Tensor:
    """The input at a size where scores have deviation 1, as in a working model."""
    deviation = float(attention.scores(X, X, layer.W).std())
    return X / max(deviation, 1e-6) ** 0.5


def _proof(problem: Problem, X: Tensor) -> tuple[str, str]:
    """What can be proved of an input, in words, and the extra that is missing for a proof."""
    try:
        certificate = certify(problem, X)
    except MissingExtra as missing:
        return f"; not proved: {missing}", missing.extra
    if certificate.radius is None:
        return "", ""
    return f"; proved: one exact input lies within {certificate.radius:.0e} of this one", ""


def _layer(oracle: Oracle) -> Attention | None:
    """The planted layer under the wrappers, if there is one that answers for every token."""
    inner: object = oracle
    while inner is not None:
        if isinstance(inner, Attention):
            return inner if inner.every_token else None
        inner = getattr(inner, "inner", None)
    return None


def _run(
    row: Row,
    method: Solve,
    exposure: Exposure,
    layer: Attention,
    secret: Tensor,
    output: Tensor,
    track: Track,
) -> Finding:
    problem = _problem(row, layer, secret, output)
    inversion = method(problem, progress=track(words.exposure(exposure)))
    status, reason, error = _compared(inversion, secret, row.decimals)
    extra = ""
    if inversion.X is not None and inversion.solved:
        proof, extra = _proof(problem, inversion.X)
        reason += proof
    return Finding(
        exposure=exposure,
        attack=type(method).__name__,
        status=status,
        reason=reason,
        remedy=row.remedy,
        error=error,
        queries=1,
        seconds=inversion.seconds,
        known=1.0 if status is Status.RECOVERED else 0.0,
        sought="input",
        extra=extra,
    )


def _problem(row: Row, layer: Attention, secret: Tensor, output: Tensor) -> Problem:
    """What the attacker has: the layer, its output as it leaks, and the maps where they do."""
    problem = Problem(layer.W, layer.V, output, causal=layer.causal)
    if row.decimals is not None:
        rounded = output.round(decimals=row.decimals)
        problem = replace(problem, B=rounded, tolerance=0.5 * 10.0**-row.decimals)
    return replace(problem, maps=problem.maps_of(secret)) if row.maps else problem


def _compared(
    inversion: Inversion, secret: Tensor, decimals: int | None
) -> tuple[Status, str, float | None]:
    """The inversion next to what was put in."""
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
