"""What a defence would change: each in front of the target, attacked by an attacker who knows it.

Asked for by --against-defences. Of an endpoint that scores with one head, every defence that a
server can put up (extract/defences.py); of a model, secrets in front of what leaks (recover).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from keyhole.audit.check import Check, Checked
from keyhole.audit.texts import TextTarget, exposure_of
from keyhole.core import Finding, Outcome, Skip
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

_BROKEN = "Do not rely on it: count queries per client, and treat what they bring as given away."
_HELD = "It held against what was tried, at the cost to honest clients that is stated."
_GIVEN = "Keep what leaks inside: a secret that texts of one's own give away is none."
_CLOSED = "It held against what was tried; memory, keys and the server's own answers stay open."


def endpoint_checks(part: str, oracle: Oracle, seed: int) -> list[Check]:
    """Every defence in front of an endpoint that scores with one head."""
    choice = cache(partial(choose, oracle, seed))
    client = cache(partial(HonestClient.of, oracle, seed))
    return [
        Check(
            exposure := Exposure(
                "KH-WEIGHTS-ROUNDED-SCORES", "defended", name=trial.name, part=part
            ),
            partial(_endpoint, trial, exposure, oracle, lambda: choice().kind, client, seed),
        )
        for trial in trials(oracle.dim, seed=seed)
    ]


def _endpoint(
    trial: Trial, exposure: Exposure, oracle: Oracle, kind: Callable[[], Kind],
    client: Callable[[], HonestClient], seed: int, track: Track,
) -> Checked:  # fmt: skip
    anywhere = replace(exposure, part="")
    try:
        if kind() is not Kind.HEAD:
            reason = f"it is for one head's scores; this target gives {kind()}"
            return Checked(skips=(Skip(anywhere, "none", reason),))
        tried = try_defence(trial, oracle, client(), seed, track(words.exposure(exposure)))
    except OracleError as error:
        return Checked(skips=(Skip(anywhere, "none", str(error), unchecked=True),))
    had = "nothing" if tried.attacker_error is None else f"a copy off by {tried.attacker_error:.1e}"
    refused = f", {tried.refused:.0%} of its questions refused" if tried.refused else ""
    reason = (
        f"{tried.setting}: the attacker has {had}, an honest client answers off by "
        f"{tried.honest_error:.1e}{refused}; {tried.reason}"
    )
    finding = Finding(
        exposure, tried.attack, tried.status, reason, _BROKEN if _broken(tried) else _HELD,
        error=tried.attacker_error, queries=tried.queries, seconds=tried.seconds,
    )  # fmt: skip
    return Checked((finding,))


def _broken(tried: Tried | LeakTried) -> bool:
    return OUTCOMES[tried.status] is Outcome.GIVEN_AWAY


def model_checks(part: str, target: TextTarget, seed: int) -> list[Check]:
    """Secrets in front of a model's keys and values and its hidden states."""
    return [
        Check(
            exposure := replace(
                exposure_of(leak.kind), layer=leak.layer, defences=(defence,), part=part
            ),
            partial(_model, exposure, target, leak, defence, seed),
        )
        for leak, defence in _leaks(anatomy(target.loaded.model))
    ]


def _leaks(parts: Anatomy) -> list[tuple[Captured, str]]:
    first, middle = Captured("kv", caches(parts)[0]), Captured("hidden", -(-parts.layers // 2))
    shown = not parts.lacks("kv", first.layer + parts.causal)
    forms = [form for form in SECRETS if shown and (parts.rotary or form != "cloaked")]
    return [*((first, form) for form in forms), (middle, "rotated")]


def _model(
    exposure: Exposure, target: TextTarget, leak: Captured, defence: str, seed: int, track: Track
) -> Checked:
    track(words.exposure(exposure))(0)
    tried = read_behind(target.loaded, target.texts, leak, defence, seed)
    own = f", with {tried.own} texts that the attacker sent" if tried.own else ""
    reason = f"{tried.exact} of {tried.texts} texts exact and verified{own}; {tried.reason}"
    finding = Finding(
        exposure, tried.attack, tried.status, reason, _GIVEN if _broken(tried) else _CLOSED,
        queries=tried.texts + tried.own, seconds=tried.seconds, known=tried.tokens, sought="text",
    )  # fmt: skip
    return Checked((finding,))
