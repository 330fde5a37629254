"""What a defence would change: each in front of the target, attacked by an attacker who knows it.

Asked for by --against-defences. Of an endpoint that scores with one head, every defence that a
server can put up (extract/defended); of a model, secrets in front of what leaks (recover).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from keyhole.audit.check import Check, Checked, nothing_to_try
from keyhole.audit.texts import TextTarget
from keyhole.core import Finding, Outcome, Skip
from keyhole.core.errors import InputError
from keyhole.core.progress import Track
from keyhole.core.status import OUTCOMES
from keyhole.extract.auto import Kind, choose
from keyhole.extract.defences import HonestClient, Trial, Tried, trials, try_defence
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure
from keyhole.oracle import Oracle, OracleError
from keyhole.recover.defences import LeakTried, read_behind
from keyhole.recover.registry import caches
from keyhole.recover.secrets import FORMS

_BROKEN = "Do not rely on it: count queries per client, and treat what they bring as given away."
_HELD = "It held against what was tried, at the cost to honest clients that is stated."
_GIVEN = "Keep what leaks inside: a secret that texts of one's own give away is none."
_CLOSED = "It held against what was tried; memory, keys and the server's own answers stay open."


def endpoint_checks(surface: str, oracle: Oracle, seed: int) -> list[Check]:
    """Every defence in front of an endpoint that scores with one head."""
    choice = cache(partial(choose, oracle, seed))
    client = cache(partial(HonestClient.of, oracle, None, seed))
    return [
        Check(
            f"weights behind {trial.name}",
            partial(_endpoint, trial, surface, oracle, lambda: choice().kind, client, seed),
        )
        for trial in trials(oracle.dim, seed=seed)
    ]


def _endpoint(
    trial: Trial, surface: str, oracle: Oracle, kind: Callable[[], Kind],
    client: Callable[[], HonestClient], seed: int, track: Track,
) -> Checked:  # fmt: skip
    exposure = f"scores behind a defence: {trial.name}"
    try:
        if kind() is not Kind.HEAD:
            reason = f"it is for one head's scores; this target gives {kind()}"
            return Checked(skips=(Skip(exposure, "none", reason),))
        tried = try_defence(trial, oracle, client(), seed, track(exposure))
    except OracleError as error:
        return Checked(skips=(Skip(exposure, "none", str(error), unchecked=True),))
    return Checked((_weights(tried, surface, exposure),))


def _weights(tried: Tried, surface: str, exposure: str) -> Finding:
    broken = OUTCOMES[tried.status] is Outcome.GIVEN_AWAY
    had = "nothing" if tried.thief_error is None else f"a copy off by {tried.thief_error:.1e}"
    refused = f", {tried.refused:.0%} of its questions refused" if tried.refused else ""
    return Finding(
        surface=surface,
        exposure=exposure,
        attack=tried.attack,
        status=tried.status,
        reason=f"{tried.setting}: the attacker has {had}, an honest client answers off by "
        f"{tried.honest_error:.1e}{refused}; {tried.reason}",
        remedy=_BROKEN if broken else _HELD,
        error=tried.thief_error,
        queries=tried.queries,
        seconds=tried.seconds,
    )


def model_checks(surface: str, target: TextTarget, seed: int) -> list[Check]:
    """Secrets in front of a model's keys and values and its hidden states."""
    try:
        parts = anatomy(target.loaded.model)
    except InputError as error:  # a family whose parts are not known here
        return [nothing_to_try("text behind a defence", Skip("the text", "none", str(error)))]
    return [
        Check(
            f"text from {exposure} behind a defence: {defence}",
            partial(_model, surface, target, exposure, defence, seed),
        )
        for exposure, defence in _leaks(parts)
    ]


def _leaks(parts: Anatomy) -> list[tuple[Exposure, str]]:
    first, middle = Exposure("kv", caches(parts)[0]), Exposure("hidden", -(-parts.layers // 2))
    return [*((first, form) for form in FORMS), (middle, "rotated")]


def _model(
    surface: str, target: TextTarget, exposure: Exposure, defence: str, seed: int, track: Track
) -> Checked:
    track(f"{exposure}, {defence}")(0)
    tried = read_behind(target.loaded, target.texts, exposure, defence, seed)
    return Checked((_text(tried, surface, exposure),))


def _text(tried: LeakTried, surface: str, exposure: Exposure) -> Finding:
    own = f", with {tried.own} texts that the attacker sent" if tried.own else ""
    kinds = {"kv": "keys and values", "hidden": "hidden states"}
    broken = OUTCOMES[tried.status] is Outcome.GIVEN_AWAY
    return Finding(
        surface=surface,
        exposure=f"{kinds[exposure.kind]} of layer {exposure.layer}, {tried.defence}",
        attack=tried.attack,
        status=tried.status,
        reason=f"{tried.exact} of {tried.texts} texts exact and verified{own}; {tried.reason}",
        remedy=_GIVEN if broken else _CLOSED,
        error=None,
        queries=tried.texts + tried.own,
        seconds=tried.seconds,
        known=tried.tokens,
        sought="text",
    )
