"""The texts of leaks: an attack proposes token ids, and a judge runs the model on them.

`recover_each` is the path of every leak. The attack (attack.py) yields a `Proposal`,
the judge of this kind of leak gives a `Verdict`, and the two make a `TextRecovery`
(recovery.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.loading import identity
from keyhole.models.pairs import behind, decoder_of
from keyhole.models.pieces import unknown_token
from keyhole.recover.attack import Attack, Proposal, Target, TokenCount, solvable
from keyhole.recover.embeddings.judge import judge_vector
from keyhole.recover.layers.judge import judge_rows
from keyhole.recover.layers.mixed import judge_mixed, unmixed
from keyhole.recover.leaks import BaseLeak, KeyValues, Leak, MixedCache
from keyhole.recover.recovery import Judge, TextRecovery, Verdict
from keyhole.recover.registry import ATTACKS, readers

NOT_ARRIVED = "the search ended before it found the text, which proves nothing"
LEARN_MORE = "--corpus FILE, with more texts like those to be found, may read more"
_JUDGES: dict[str, Judge] = {"pooled": judge_vector, "mixed": judge_mixed}


def recover_texts(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
    *,
    method: Attack | None = None,
    progress: Progress = silent,
) -> list[TextRecovery]:
    """Recover the texts of many leaks of one exposure, in the order of the leaks."""
    recoveries = dict(
        recovering(model, tokenizer, leaks, method=method, progress=progress)
    )
    return [recoveries[number] for number in range(len(leaks))]


def recovering(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
    *,
    method: Attack | None = None,
    progress: Progress = silent,
    track: Track = untracked,
) -> Iterator[tuple[int, TextRecovery]]:
    """Yield the number of each leak with its recovery, as soon as it is there.

    `progress` gets the number of tokens that fit so far and the total. `track` follows
    the parts of an attack that has several.
    """
    target = replace(target_of(model, tokenizer, leaks), progress=progress, track=track)
    yield from recover_each(
        target, dict(enumerate(checked_leaks(target, leaks))), method
    )


def target_of(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
) -> Target:
    """Return the model that leaked; if the leaks hold an encoder's states, that is the decoder."""
    states = getattr(leaks[0], "encoder", None) if leaks else None
    if states is None:
        return Target.of(model, tokenizer)
    decoder = decoder_of(model)
    with behind(decoder, states):
        return Target.of(decoder, tokenizer)


def recover_each(
    target: Target,
    leaks: Mapping[int, Leak],
    method: Attack | None = None,
) -> Iterator[tuple[int, TextRecovery]]:
    """Yield the number of each checked leak with its recovery; the leak decides without `method`.

    Leaks of a decoder are attacked one by one, each with its encoder's states. Of
    caches, those that a secret has mixed come first.
    """
    left = dict(leaks)
    for number, leak in leaks.items():
        if leak.encoder is not None:
            with behind(target.model, leak.encoder):
                yield from recover_each(
                    target, {number: replace(leak, encoder=None)}, method
                )
            del left[number]
            continue
        mixed = unmixed(target, leak) if method is None else None
        if mixed is not None:
            for _, recovery in _attack_and_judge(target, {number: mixed}, None):
                if recovery.status in (Status.RECOVERED, Status.INEXACT, Status.BUDGET):
                    del left[number]
                    yield number, recovery
    if left:
        yield from _attack_and_judge(target, left, method)


def _attack_and_judge(
    target: Target,
    leaks: Mapping[int, Leak],
    attack: Attack | None,
) -> Iterator[tuple[int, TextRecovery]]:
    """Attack leaks of one kind, judge every proposal, and time each of them."""
    since = time.perf_counter()
    left = dict(leaks)
    numbers = list(leaks)
    texts = list(leaks.values())
    target = replace(target, count=TokenCount(texts, target.progress))
    try:
        attack = attack or _default_attack(target, texts[0])
        with solvable(target.model):
            for place, proposal in attack(target, texts):
                recovery = _recovery(target, left.pop(numbers[place]), attack, proposal)
                target.count.set(place, len(recovery.ids))
                yield (
                    numbers[place],
                    replace(recovery, seconds=time.perf_counter() - since),
                )
                since = time.perf_counter()
    except Unsuccessful as end:
        seconds = (time.perf_counter() - since) / max(1, len(left))
        name = "" if attack is None else type(attack).__name__
        for number in left:
            yield (
                number,
                TextRecovery(end.status, end.reason, name, [], "", False, 0, seconds),
            )


def _default_attack(target: Target, leak: Leak) -> Attack:
    """Return the first attack of the registry that reads this leak."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if names:
        return ATTACKS.make(names[0])
    order = " in no order" if leak.in_no_order else ""
    reason = f"no attack reads {leak.exposure}{order} of {target.kind}"
    raise not_applicable(reason)


def _recovery(
    target: Target,
    leak: Leak,
    attack: Attack,
    proposal: Proposal,
) -> TextRecovery:
    """Judge a proposal, and explain the verdict for this kind of leak."""
    ids = proposal.ids
    if not ids or len(ids) != (leak.length or len(ids)):
        reason = f"{len(ids)} tokens proposed for {leak.length} positions"
        verdict = Verdict.without_fit(Status.UNSOLVED, reason, len(ids))
    else:
        verdict = _JUDGES.get(leak.kind, judge_rows)(target, leak, ids)
    status = verdict.status
    lost = _lost(target, leak, ids)
    unread = ""
    if lost and status is Status.RECOVERED:
        status = (
            Status.INEXACT
        )  # every token is right, but not every character is known
    if status is Status.UNSOLVED and proposal.excluded and (verdict.residual or 0) > 1:
        status = Status.MISMATCH
        unread = proposal.excluded
    if leak.kind == "pooled" and status in (Status.UNSOLVED, Status.MISMATCH):
        # A search for one vector goes through too few texts to rule anything out.
        status = Status.BUDGET
        unread = f"{NOT_ARRIVED}: {LEARN_MORE}"
    notes = (verdict.reason, *lost, unread, proposal.note)
    return TextRecovery(
        status=status,
        reason="; ".join(note for note in notes if note),
        method=type(attack).__name__,
        ids=ids,
        text=target.decode(ids),
        verified=verdict.verified,
        passes=proposal.passes + verdict.forwards,
        seconds=0.0,
        marks=verdict.marks,
        residual=verdict.residual,
        precision=verdict.precision,
        forwards=proposal.forwards + verdict.forwards,
        fitting=proposal.fitting,
        tested=proposal.tested,
        judging=verdict.forwards,
        similarity=verdict.similarity,
        pieces=target.pieces(ids),
    )


def _lost(
    target: Target,
    leak: Leak,
    ids: list[int],
) -> list[str]:
    """Return notes on what the text had and its tokens do not show."""
    notes: list[str] = []
    unknown = unknown_token(target.tokenizer)
    count = ids.count(unknown) if unknown is not None else 0
    if count:
        name = target.tokenizer.convert_ids_to_tokens(unknown)
        notes.append(
            f"{count} {name}: the text had characters that the tokenizer has no token for"
        )
    if leak.length == target.parts.max_length:
        notes.append(
            f"as long as the model's limit of {leak.length} tokens: probably cut off"
        )
    return notes


def checked_leaks(target: Target, leaks: Sequence[Leak]) -> list[Leak]:
    """Return the leaks without trailing padding; refuse what cannot be this model's."""
    texts = [_checked(target, leak) for leak in leaks]
    same = {
        (text.kind, text.exposure, text.in_no_order, text.encoder is None)
        for text in texts
    }
    if len(same) > 1:
        raise InputError("the leaks are of several exposures: recover each by itself")
    return texts


def _checked(target: Target, leak: Leak) -> Leak:
    if not isinstance(leak, BaseLeak):  # pyright: ignore[reportUnnecessaryIsInstance]
        names = ", ".join(kind.__name__ for kind in get_args(Leak))
        raise InputError(f"expected a leak ({names}), got {type(leak).__name__}")
    leak.exposure.block(target.parts)  # refuses a layer that the model does not have
    if leak.model is not None and leak.model != identity(target.model):
        raise InputError(
            f"the leak is of the model {leak.model}, and this is {identity(target.model)}"
        )
    for name, expected in _shapes(target, leak).items():
        shape = tuple(leak.tensors[name].shape)
        if shape != expected:
            raise InputError(
                f"expected {name} of {leak.exposure} with shape {expected}, "
                f"got {shape}: is it another model's?"
            )
    if leak.mask is None or leak.length is None:
        return leak
    if not leak.mask.any():
        raise InputError("the mask is only padding: there is no text")
    return leak.cut(int(leak.mask.nonzero().max()) + 1)


def _shapes(target: Target, leak: Leak) -> dict[str, tuple[int | None, ...]]:
    """Return the shape that each tensor of a leak must have to be this model's."""
    parts = target.parts
    length = leak.length
    if length is not None and length > parts.max_length:
        raise InputError(
            f"the leak has {length} positions, and the model takes at most {parts.max_length}"
        )
    if isinstance(leak, KeyValues | MixedCache):
        usual = (1, parts.key_heads, 0, parts.head_dim)
        keys, values = parts.cached.get(leak.exposure.block(parts)) or (usual, usual)
        positions = leak.keys.shape[1]
        return {
            "keys": (keys[1], positions, keys[3]),
            "values": (values[1], positions, values[3]),
        }
    width = leak.exposure.width or parts.width
    if width > parts.width:
        raise InputError(
            f"the rows have {width} numbers, and the model is {parts.width} wide"
        )
    shapes = {
        "hidden": (length, width),
        "attention": (length, parts.width),
        "maps": (parts.heads, length, length),
        "pooled": (width,),
        "logits": (1, target.vocabulary),
    }
    return {"values": shapes[leak.kind]}
