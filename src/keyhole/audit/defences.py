"""The checks of --against-defences: each defence put in front of the target, and attacked.

The attacker knows the defence. For an endpoint that scores with one head, these are the
defences of servers (extract/defences.py); for a model, secret transforms of what leaks
(recover/defences.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from keyhole.audit.check import Check, Checked, one_skip
from keyhole.audit.texts import TextTarget, exposure_of
from keyhole.core import Finding, Outcome
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.core.status import OUTCOMES
from keyhole.extract.auto import Kind, choose
from keyhole.extract.defences import HonestClient, Trial, Tried, trials, try_defence
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure as Captured
from keyhole.oracle import Oracle, OracleError
from keyhole.recover.defences import LeakTried, read_behind
from keyhole.recover.registry import caches
from keyhole.recover.secrets import SECRETS
from keyhole.report import words

# Remedies, by what is defended and whether the attack broke the defence.
_ENDPOINT_BROKEN = (
    "Do not rely on it: count queries per client, and treat what they bring as "
    "given "
    "away."
)
_ENDPOINT_HELD = (
    "It held against what was tried, at the cost to honest clients that is stated."
)
_MODEL_BROKEN = (
    "Keep what leaks inside: a secret that texts of one's own give away is none."
)
_MODEL_HELD = "It held against what was tried; memory, keys and the server's own answers stay open."


def endpoint_checks(part: str, oracle: Oracle, seed: int) -> list[Check]:
    """Return a check for each defence of an endpoint that scores with one head."""
    choice = cache(partial(choose, oracle, seed))
    client = cache(partial(HonestClient.of, oracle, seed))
    return [
        Check(
            exposure := Exposure(
                "KH-WEIGHTS-ROUNDED-SCORES", "defended", name=trial.name, part=part
            ),
            partial(
                _check_endpoint,
                trial,
                exposure,
                oracle,
                lambda: choice().kind,
                client,
                seed,
            ),
        )
        for trial in trials(oracle.dim, seed=seed)
    ]


def _check_endpoint(
    trial: Trial,
    exposure: Exposure,
    oracle: Oracle,
    kind: Callable[[], Kind],
    client: Callable[[], HonestClient],
    seed: int,
    track: Track,
) -> Checked:
    of_any_part = replace(exposure, part="")
    try:
        if kind() is not Kind.HEAD:
            reason = f"it is for one head's scores; this target gives {kind()}"
            return one_skip(of_any_part, "none", reason)
        tried = try_defence(
            trial, oracle, client(), seed, track(words.exposure(exposure))
        )
    except OracleError as error:
        return one_skip(of_any_part, "none", str(error), unchecked=True)
    if tried.attacker_error is None:
        had = "nothing"
    else:
        had = f"a copy off by {tried.attacker_error:.1e}"
    refused = f", {tried.refused:.0%} of its questions refused" if tried.refused else ""
    reason = (
        f"{tried.setting}: the attacker has {had}, an honest client answers off by "
        f"{tried.honest_error:.1e}{refused}; {tried.reason}"
    )
    finding = Finding(
        exposure,
        tried.attack,
        tried.status,
        reason,
        _ENDPOINT_BROKEN if _is_broken(tried) else _ENDPOINT_HELD,
        error=tried.attacker_error,
        queries=tried.queries,
        seconds=tried.seconds,
    )
    return Checked((finding,))


def _is_broken(tried: Tried | LeakTried) -> bool:
    return OUTCOMES[tried.status] is Outcome.GIVEN_AWAY


def model_checks(part: str, target: TextTarget, seed: int) -> list[Check]:
    """Return a check for each secret transform of a model's cache and hidden states."""
    return [
        Check(
            exposure := replace(
                exposure_of(leak.kind), layer=leak.layer, defences=(defence,), part=part
            ),
            partial(_check_model, exposure, target, leak, defence, seed),
        )
        for leak, defence in _leaks_and_defences(anatomy(target.loaded.model))
    ]


def _leaks_and_defences(parts: Anatomy) -> list[tuple[Captured, str]]:
    """Return what leaks of a model, each time with the defence in front of it."""
    first = Captured("kv", caches(parts)[0])
    middle = Captured("hidden", -(-parts.layers // 2))
    has_cache = not parts.lacks("kv", first.layer + parts.causal)
    forms = [
        form for form in SECRETS if has_cache and (parts.rotary or form != "cloaked")
    ]
    return [*((first, form) for form in forms), (middle, "rotated")]


def _check_model(
    exposure: Exposure,
    target: TextTarget,
    leak: Captured,
    defence: str,
    seed: int,
    track: Track,
) -> Checked:
    track(words.exposure(exposure))(0)
    tried = read_behind(target.loaded, target.texts, leak, defence, seed)
    own = f", with {tried.own} texts that the attacker sent" if tried.own else ""
    reason = (
        f"{tried.exact} of {tried.texts} texts exact and verified{own}; {tried.reason}"
    )
    finding = Finding(
        exposure,
        tried.attack,
        tried.status,
        reason,
        _MODEL_BROKEN if _is_broken(tried) else _MODEL_HELD,
        queries=tried.texts + tried.own,
        seconds=tried.seconds,
        known=tried.tokens,
        sought="text",
    )
    return Checked((finding,))
