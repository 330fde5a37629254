"""The checks of --against-defences: each defence put in front of the target, and attacked.

The attacker knows the defence. For an endpoint that scores with one head, these are the
defences of servers (extract/defences.py); for a model, secrets that hide what leaks
(recover/own_texts.py); for a store, noise and signs (audit/stores.py), whose price
`recall` measures:

    recall@10   the share of the ten texts nearest to a query by plain vectors that are among the
                ten nearest by stored vectors
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from torch import Tensor
from torch.nn.functional import normalize

from keyhole.audit.check import Check, Checked, one_finding, one_skip
from keyhole.audit.texts import (
    PARTLY,
    TextTarget,
    exposure_of,
    originals_of,
    readings_of,
)
from keyhole.core import Outcome, Readings, Status, Unsuccessful
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.core.status import OUTCOMES
from keyhole.defence import Changes, Defence
from keyhole.extract.auto import Kind, choose
from keyhole.extract.defences import HonestClient, server_defences, try_defence
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure as Captured
from keyhole.oracle import Oracle, OracleError
from keyhole.recover import leak_of, recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.gradients.update import DELTA, epsilon_of
from keyhole.recover.own_texts import ATTACKS, hidden, own_texts, secret, undone
from keyhole.recover.registry import caches
from keyhole.recover.secrets import SECRETS, Pairs
from keyhole.report import words

NEAREST = 10
DISTANCE = 2.0  # the largest distance of two vectors of length one
_NOISE = (0.1, 0.3, 1.0)  # lengths of noise, relative to the vector's length
# Remedies, by what is defended and whether the attack broke the defence.
_ENDPOINT = {
    True: "Do not rely on it: count queries per client, and treat what they bring as given away.",
    False: "It held against what was tried, at the cost to honest clients that is stated.",
}
_MODEL = {
    True: "Keep what leaks inside: a secret that texts of one's own give away is none.",
    False: "It held against what was tried; memory, keys and the server's own answers stay open.",
}


def _is_broken(status: Status) -> bool:
    return OUTCOMES[status] is Outcome.GIVEN_AWAY


def endpoint_checks(
    part: str,
    oracle: Oracle,
    seed: int,
) -> list[Check]:
    """Return a check for each defence of an endpoint that scores with one head."""
    choice = cache(partial(choose, oracle, seed))
    client = cache(partial(HonestClient.of, oracle, seed))

    def check(
        defence: Defence,
        exposure: Exposure,
        track: Track,
    ) -> Checked:
        of_any_part = replace(exposure, part="")
        try:
            if (kind := choice().kind) is not Kind.HEAD:
                reason = f"it is for one head's scores; this target gives {kind}"
                return one_skip(of_any_part, "none", reason)
            progress = track(words.exposure(exposure))
            tried = try_defence(defence, oracle, client(), seed, progress)
        except OracleError as error:
            return one_skip(of_any_part, "none", str(error), unchecked=True)
        had = "nothing" if tried.error is None else f"a copy off by {tried.error:.1e}"
        honest = f"an honest client answers off by {tried.service.error:.1e}"
        if tried.service.refused:
            honest += f", {tried.service.refused:.0%} of its questions refused"
        return one_finding(
            exposure,
            tried.attack,
            tried.status,
            f"{str(defence) or 'answers as they are'}: the attacker has {had}, {honest}; "
            f"{tried.extraction.reason}",
            _ENDPOINT[_is_broken(tried.status)],
            queries=tried.extraction.queries,
            error=tried.error,
        )

    checks: list[Check] = []
    for defence in server_defences(oracle.dim, seed):
        exposure = Exposure(
            "KH-WEIGHTS-ROUNDED-SCORES", "defended", name=defence.name, part=part
        )
        checks.append(Check(exposure, partial(check, defence, exposure)))
    return checks


def model_checks(
    part: str,
    target: TextTarget,
    seed: int,
) -> list[Check]:
    """Return a check for each secret in front of a model's cache and hidden states."""
    checks: list[Check] = []
    for leak, form in _leaks_and_secrets(anatomy(target.loaded.model)):
        exposure = replace(
            exposure_of(leak.kind), layer=leak.layer, defences=(form,), part=part
        )
        run = partial(_check_model, exposure, target, leak, secret(form), seed)
        checks.append(Check(exposure, run))
    return checks


def _leaks_and_secrets(parts: Anatomy) -> list[tuple[Captured, str]]:
    """Return what leaks of a model, each time with the secret in front of it."""
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
    defence: Defence,
    seed: int,
    track: Track,
) -> Checked:
    track(words.exposure(exposure))(0)
    model = target.loaded.model
    tokenizer = target.loaded.tokenizer
    attacked = Target.of(model, tokenizer)
    originals = originals_of(target.loaded, target.texts)
    count = len(originals)
    leaks = [
        hidden(leak_of(model, tokenizer, text, leak), defence, seed + number)
        for number, text in enumerate(target.texts)
    ]
    if defence.name == "cloaked":  # it is read without texts of one's own
        sent = attack = ""
        pairs: Pairs = []
    else:
        pairs = own_texts(attacked, leak, defence, seed)
        sent = f", with {len(pairs)} texts that the attacker sent"
        attack = ATTACKS[defence.name]
    exact = 0
    known = 0.0
    try:
        plain = undone(pairs, leaks, defence) if pairs else leaks
        read = recover_texts(model, tokenizer, plain)
    except Unsuccessful as end:
        status = end.status
        reason = end.reason
    else:
        readings = readings_of(tokenizer, originals, read)
        cell = Readings(leak.kind, leak.layer, defence.name, readings)
        exact = cell.exact
        known = cell.known
        status = Status.UNSOLVED
        if exact == count:
            status = Status.RECOVERED
        elif exact or known >= PARTLY:
            status = Status.INEXACT
        reason = read[0].reason
        attack = (
            attack or next((each for each in read if each.verified), read[0]).method
        )
    return one_finding(
        exposure,
        attack,
        status,
        f"{exact} of {count} texts exact and verified{sent}; {reason}",
        _MODEL[_is_broken(status)],
        queries=count + len(pairs),
        known=known,
        sought="text",
    )


def store_defences(dim: int, seed: int = 0) -> list[Defence]:
    """Return the defences of vectors of length one: noise of several lengths, and signs."""
    vectors = Changes.VECTORS
    signs = Defence(name="rounding, signs", changes=vectors, precision="binary")
    return [*(gaussian_noise(share, dim, seed) for share in _NOISE), signs]


def gaussian_noise(
    share: float,
    dim: int,
    seed: int = 0,
) -> Defence:
    """Return noise whose length is `share` of a vector's, with the ε of one release.

    f + σ g is (ε, δ)-private for σ = Δ·noise(ε), with Δ = 2 the largest distance of two
    vectors (Balle and Wang, arXiv 1805.06530).
    """
    sigma = share * dim**-0.5
    epsilon = epsilon_of(sigma / DISTANCE)
    name = f"Gaussian noise, ε = {epsilon:.2g}, δ = {DELTA:g}"
    return Defence(name=name, changes=Changes.VECTORS, noise=sigma, seed=seed)


def recall(
    docs: Tensor,
    kept: Tensor,
    queries: Tensor,
    asked: Tensor,
) -> float:
    """Return the share of the texts nearest by plain vectors that are nearest by stored ones too.

    `docs` are the plain vectors of texts and `queries` those of queries; `kept` and
    `asked` are what the defence makes of them.
    """
    near = [
        (normalize(left, dim=-1) @ normalize(right, dim=-1).T)
        .topk(min(NEAREST, len(docs)))
        .indices
        for left, right in ((queries, docs), (asked, kept))
    ]
    return float((near[0][:, :, None] == near[1][:, None]).any(-1).float().mean())
