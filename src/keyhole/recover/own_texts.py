"""Leaks behind a secret, read by an attacker whose own texts leak with the same secret.

The attacker knows the form of the secret but not its key, and uses the server: the
plain and the stored leaks of a few random texts give the secret away (secrets.py).
KV-Cloak needs no such texts (layers/mixed.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keyhole.core.float64 import random_stream
from keyhole.defence import Changes, Defence
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import Leak
from keyhole.recover.secrets import BLOCK, Pairs, matrices_of, unrotated, unshielded
from keyhole.recover.simulate import defended, leak_of

_KEY = 7  # from which secrets are drawn; any number would do
_OWN_LENGTH = 3 * BLOCK  # tokens of a text that the attacker sends
_SEED_OFFSET = 10_000  # keeps the seeds of the attacker's texts apart from the others
ATTACKS = {  # what the texts are used for, by the form of the secret
    "rotated": "rotation solved from rows of own texts",
    "shielded": "columns of own texts matched",
}
_SURPLUS = 1.3  # rows that the attacker collects for each dimension


def secret(form: str) -> Defence:
    """Return the defence of states by a secret of this form (SECRETS)."""
    return Defence(name=form, changes=Changes.STATES, forms=(f"{form}:{_KEY}",))


def hidden(
    leak: Leak,
    defence: Defence,
    seed: int,
) -> Leak:
    """Return the leak of one text behind a defence; `seed` draws what is new for each text."""
    return defended(leak, defence, random_stream(seed))


def own_texts(
    target: Target,
    exposure: Exposure,
    defence: Defence,
    seed: int,
    count: int | None = None,
) -> Pairs:
    """Return the plain leak and the stored one of random texts, as many as are needed."""
    stream = random_stream(seed)
    length = min(_OWN_LENGTH, target.parts.max_length)

    def leak() -> Leak:
        ids = random_texts(target, 1, length, stream)[0].tolist()
        return leak_of(target.model, None, ids, exposure)

    if count is None:
        width = max(matrix.shape[1] for matrix in matrices_of(leak()))
        enough = math.ceil(int(_SURPLUS * width) / length) + 1
        count = 1 if defence.name == "shielded" else enough
    plain = [leak() for _ in range(count)]
    return [
        (each, hidden(each, defence, seed + _SEED_OFFSET + number))
        for number, each in enumerate(plain)
    ]


def undone(
    known: Pairs,
    leaks: Sequence[Leak],
    defence: Defence,
) -> list[Leak]:
    """Return the leaks without the secret, as far as the known texts determine it."""
    if defence.name == "rotated":
        return unrotated(known, leaks)
    return unshielded(known, leaks)
