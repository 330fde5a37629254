"""Checks of an endpoint that takes vectors: are its weights given away, or the inputs of a layer?

**Weights** from answers: one check for each kind of answer, by the attack that reads
it. They are listed in extract/registry.py.

**Inputs** from the output of a layer whose weights are public, as a debug endpoint
returns it. The auditor makes up an input, queries the endpoint with it, and gives the
attack the layer's weights and the output, nothing else. Since the auditor knows the
input, it can tell whether the attack found that input, and not merely one with the same
output. invert/registry.py lists the leaks and their attacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import Tensor

from keyhole import attention
from keyhole.audit import defences
from keyhole.audit.check import (
    Check,
    Checked,
    Part,
    one_finding,
    one_skip,
    skipped_check,
)
from keyhole.audit.options import AuditOptions
from keyhole.core import Skip, Status
from keyhole.core.errors import MissingExtra
from keyhole.core.exposure import Exposure
from keyhole.core.float64 import normal, random_stream
from keyhole.core.progress import Track
from keyhole.extract.auto import Choice, choose
from keyhole.extract.judge import Method, judge
from keyhole.extract.registry import METHODS as EXTRACTIONS
from keyhole.extract.registry import Row as AnswerRow
from keyhole.invert import Inversion, Problem, certify
from keyhole.invert.judge import SAME
from keyhole.invert.registry import METHODS as INVERSIONS
from keyhole.invert.registry import Row as LeakRow
from keyhole.invert.solvers.multistart import Solve
from keyhole.oracle import Counted, Oracle, OracleError, ask, identity_of
from keyhole.oracle.planted import Attention
from keyhole.oracle.protocol import layers
from keyhole.report import words

LENGTH = 6  # tokens of the secret input
_INPUT_SECONDS = 2.5  # that a check of inputs takes, as measured on the demo


@dataclass(frozen=True, eq=False)
class EndpointPart(Part):
    """An oracle whose weights and inputs are sought; `observed` if it is a server."""

    name: str
    oracle: Oracle
    observed: bool = False

    @property
    def identity(self) -> str:
        return identity_of(self.oracle)

    @property
    def size(self) -> int:
        return self.oracle.dim**2

    def checks(self, options: AuditOptions) -> list[Check]:
        seed = options.seed
        checks = [*self.weight_checks(seed), *self._input_checks(seed)]
        if options.against_defences:
            checks += defences.endpoint_checks(self.name, self.oracle, seed)
        return checks

    def weight_checks(
        self,
        seed: int,
        *,
        as_given: bool = False,
        budget: int | None = None,
    ) -> list[Check]:
        """Return a check of every row of the registry; it skips rows for other kinds of answers.

        `as_given` leaves out rows that simulate a server's defences: coarser answers,
        query budgets. `budget` is how many queries an attacker may make.
        """

        @cache  # the first check that runs makes a few dozen queries for it
        def choice() -> Choice | OracleError:
            try:
                return choose(self.oracle, seed)
            except OracleError as error:
                return error

        checks: list[Check] = []
        for entry, row in EXTRACTIONS.rows():
            if as_given and (row.view is not None or row.budget is not None):
                continue
            queries = budget
            if row.budget is not None:
                # It is a share of the unknowns. 1e-6 keeps rounding from losing a query.
                dim = self.oracle.dim
                queries = int(row.budget * (dim**2 + dim) + 1e-6)
            method = EXTRACTIONS.make(entry.name, seed=seed, **row.settings)
            exposure = replace(row.exposure, part=self.name)
            run = partial(self._check_weights, row, method, exposure, choice, queries)
            checks.append(Check(exposure, run, entry.name))
        return checks

    def _check_weights(
        self,
        row: AnswerRow,
        method: Method,
        exposure: Exposure,
        choice: Callable[[], Choice | OracleError],
        budget: int | None,
        track: Track,
    ) -> Checked:
        """Run the attack if it reads the kind of answer that this endpoint gives."""
        chosen = choice()
        if isinstance(chosen, Choice) and row.reads is not chosen.kind:
            reason = f"it reads {row.reads}; this target gives {chosen.kind}"
            return one_skip(row.exposure, type(method).__name__, reason, absent=True)
        try:
            if isinstance(chosen, OracleError):
                raise chosen
            oracle = chosen.view(self.oracle)
            return _extract(row, method, exposure, oracle, budget, track)
        except (
            OracleError
        ) as error:  # before the attack, or while the result was judged
            failed = Exposure("KH-WEIGHTS-SCORES", part=self.name)
            status = Status.ORACLE_FAILED
            return one_finding(
                failed, "Auto", status, str(error), status.advice, queries=0
            )

    def _input_checks(self, seed: int) -> list[Check]:
        """Return a check of every leak of a layer; they are skipped if its weights are unknown."""
        planted = (each for each in layers(self.oracle) if isinstance(each, Attention))
        layer = next((each for each in planted if each.every_token), None)
        leak = cache(partial(_input_and_output, self.oracle, seed))
        checks: list[Check] = []
        for entry, row in INVERSIONS.rows():
            method = INVERSIONS.make(entry.name, seed=seed, **row.settings)
            if layer is None:
                reason = "it needs the weights of an attention layer that answers for every token"
                skip = Skip(row.exposure, type(method).__name__, reason)
                checks.append(skipped_check(skip))
                continue
            exposure = replace(row.exposure, part=self.name)
            if layer.causal and not exposure.variant:
                exposure = replace(exposure, variant="causal")
            known = partial(leak, layer)
            run = partial(_check_input, row, method, exposure, layer, known)
            checks.append(Check(exposure, run, entry.name, weight=_INPUT_SECONDS))
        return checks


def _extract(
    row: AnswerRow,
    method: Method,
    exposure: Exposure,
    oracle: Oracle,
    budget: int | None,
    track: Track,
) -> Checked:
    expected = budget
    if budget is None:
        expected = method.expected_queries(oracle.dim)
    seen = row.view(oracle) if row.view is not None else oracle
    extraction = method(
        Counted(seen, budget, track(words.exposure(exposure), expected))
    )
    if budget is not None and extraction.model is not None:
        # The budget binds the attacker and not the auditor, who measures what the
        # attacker has.
        check = judge(oracle, extraction.model, method.seed)
        trace = ((extraction.queries, check.worst),)
        extraction = replace(extraction, check=check, trace=trace)
    status = extraction.status
    if budget is not None and status is Status.BUDGET:
        status = Status.UNSOLVED  # the budget is the defence
    return one_finding(
        exposure,
        type(method).__name__,
        status,
        extraction.reason,
        row.remedy,
        error=extraction.check and extraction.check.worst,
        queries=extraction.queries,
        seconds=extraction.seconds,
        lower_bound=extraction.lower_bound,
        known=extraction.known,
        trace=extraction.trace,
    )


def _input_and_output(
    oracle: Oracle,
    seed: int,
    layer: Attention,
) -> tuple[Tensor, Tensor]:
    """Return an input made up by the auditor, and the endpoint's output for it.

    The input is scaled so that scores have deviation 1, as in a working model.
    """
    stream = random_stream(seed ^ 0x1A9E)
    X = normal(stream, LENGTH, layer.dim)
    deviation = float(attention.scores(X, X, layer.W).std())
    secret = X / max(deviation, 1e-6) ** 0.5
    return secret, ask(oracle, secret.unsqueeze(0))[0]


def _check_input(
    row: LeakRow,
    method: Solve,
    exposure: Exposure,
    layer: Attention,
    leak: Callable[[], tuple[Tensor, Tensor]],
    track: Track,
) -> Checked:
    """Run the attack on the layer's output, and compare what it found with the input."""
    try:
        secret, output = leak()
    except OracleError as error:
        return one_skip(row.exposure, type(method).__name__, str(error), unchecked=True)
    # What the attacker has: the layer, its output, and its maps if they leak as well.
    problem = Problem(layer.W, layer.V, output, causal=layer.causal)
    if row.decimals is not None:
        rounded = output.round(decimals=row.decimals)
        problem = replace(problem, B=rounded, tolerance=0.5 * 10.0**-row.decimals)
    if row.maps:
        problem = replace(problem, maps=problem.maps_of(secret))
    inversion = method(problem, progress=track(words.exposure(exposure)))
    status, among, error = _compare(inversion, secret, row.decimals)
    reason = f"{inversion.reason}{among}"
    extra = ""
    if inversion.X is not None and inversion.solved:
        try:
            radius = certify(problem, inversion.X).radius
            if radius is not None:
                reason += (
                    f"; proved: one exact input lies within {radius:.0e} of this one"
                )
        except MissingExtra as missing:
            reason += f"; not proved: {missing}"
            extra = missing.extra
    return one_finding(
        exposure,
        type(method).__name__,
        status,
        reason,
        row.remedy,
        error=error,
        seconds=inversion.seconds,
        known=float(status is Status.RECOVERED),
        sought="input",
        extra=extra,
    )


def _compare(
    inversion: Inversion,
    secret: Tensor,
    decimals: int | None,
) -> tuple[Status, str, float | None]:
    """Compare an inversion with the input: return a status, why, and the relative error."""
    candidates = inversion.solutions
    if not candidates and inversion.X is not None:
        candidates = (inversion.X,)
    if not candidates:
        return inversion.status, "", None
    size = float(secret.abs().max())
    errors = [float((X - secret).abs().max()) / size for X in candidates]
    error = min(errors)
    count = len(errors)
    if not inversion.solved:
        return inversion.status, "", error
    among = "; it is the one put in"
    if count > 1:
        place = errors.index(error) + 1
        among = f"; number {place} of {count} inputs with this output is the one put in"
    if error <= SAME:
        return Status.RECOVERED, among, error
    if decimals is not None and error <= 1e-1:
        return Status.INEXACT, f"{among}, but for what rounding hid", error
    among = f"; none of the {count} found is the one put in"
    return Status.NOT_IDENTIFIABLE, among, error
