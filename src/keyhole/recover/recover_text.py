"""`recover_text(model, tokenizer, leak)`: the right attack for the leak, then the judge.

Which attack reads which leak stands in registry.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.capture import Exposure
from keyhole.models.loading import identity
from keyhole.recover.attack import Attack, Proposal, Target, TokenCount
from keyhole.recover.foreign import Contents, Dump, arrays_of, contents_of
from keyhole.recover.judge import judge
from keyhole.recover.leaks import TYPES, Leak
from keyhole.recover.pieces import unknown_token
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.registry import ATTACKS, readers
from keyhole.recover.served import with_served_noise
from keyhole.recover.solvable import solvable

NOT_ARRIVED = "the search ended before it came to the text, which proves nothing"
LEARN_MORE = "--corpus FILE, with more texts like those that are looked for, may read more"


def recover_text(
    model: Any,
    tokenizer: Any,
    leak: Leak | Any,
    *,
    expose: str | Exposure | None = None,
    method: Attack | None = None,
    progress: Progress = silent,
) -> TextRecovery:
    """The text that the leak gives away, verified by running the model on it.

    `leak` may be an array as well, of NumPy or torch, or several by name: `expose` says what it
    holds (`hidden:3`), or else its shape and its numbers do.
    """
    if not isinstance(leak, tuple(TYPES.values())):
        asked = Exposure.parse(expose) if isinstance(expose, str) else expose
        leaks = foreign_contents(model, tokenizer, Dump("", arrays_of(leak)), asked).leaks
        if len(leaks) > 1:
            raise InputError(f"expected one text, got {len(leaks)}: recover.run takes several")
        leak = leaks[0]
    return recover_texts(model, tokenizer, [leak], method=method, progress=progress)[0]


def recover_texts(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
    *,
    method: Attack | None = None,
    progress: Progress = silent,
) -> list[TextRecovery]:
    """Many leaks of one exposure at once, in the order in which they were given."""
    recoveries = dict(recovering(model, tokenizer, leaks, method=method, progress=progress))
    return [recoveries[number] for number in range(len(leaks))]


def foreign_contents(
    model: Any, tokenizer: Any, dump: Dump, expose: Exposure | None = None
) -> Contents:
    """The leaks in what another program wrote; readings that are possible are tried."""

    def verifies(leak: Leak) -> bool:
        try:
            return recover_text(model, tokenizer, leak).verified
        except InputError:
            return False

    target = Target.of(model, tokenizer)
    contents = contents_of(dump, target, expose, verifies)
    if dump.served:
        contents = replace(contents, leaks=with_served_noise(target, contents.leaks))
    return contents


def recovering(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
    *,
    method: Attack | None = None,
    progress: Progress = silent,
    track: Track = untracked,
) -> Iterator[tuple[int, TextRecovery]]:
    """The same, one by one as they come: (number of the leak, what became of it).

    `progress` is told how many tokens fit so far, and of how many; `track` follows the parts of an
    attack that has any.
    """
    started = time.perf_counter()
    target = Target.of(model, tokenizer)
    texts = checked(target, leaks)
    if not texts:
        return
    count = TokenCount(leaks, progress)
    clock = _Clock(count, started)
    target = replace(target, count=count, track=track)
    left = set(range(len(texts)))
    name = "" if method is None else type(method).__name__
    try:
        attack = method or _default(target, texts[0])
        name = type(attack).__name__
        with solvable(target.model):
            for number, proposal in attack(target, texts):
                clock.share(number)
                recovery = _judged(target, texts[number], proposal, name)
                left.discard(number)
                target.count.set(number, len(recovery.ids))
                yield number, replace(recovery, seconds=clock.seconds(number))
                clock.go_on()
    except Unsuccessful as end:
        clock.share(*left)
        for number in sorted(left):
            yield number, replace(_ended(end, name), seconds=clock.seconds(number))
            clock.go_on()


class _Clock:
    """The seconds of each leak: its own, and its share of what was done for several at once.

    What passes until an attack has a proposal belongs to the leaks that it worked on meanwhile, in
    equal parts; judging a proposal belongs to its leak. What happens to a result once it is out
    belongs to nobody. All seconds together are the time that the recovery took.
    """

    def __init__(self, count: TokenCount, since: float) -> None:
        self._count, self._since = count, since
        self._spent: defaultdict[int, float] = defaultdict(float)

    def share(self, *ready: int) -> None:
        """The time since the last proposal is theirs that were worked on; some are ready now."""
        now, numbers = time.perf_counter(), {*self._count.under_way, *ready}
        for number in numbers:
            self._spent[number] += (now - self._since) / len(numbers)
        self._since = now
        self._count.under_way.clear()

    def seconds(self, number: int) -> float:
        """What leak `number` took in all, what has passed since `share` included."""
        self._count.under_way &= {number}
        self.share(number)
        return self._spent[number]

    def go_on(self) -> None:
        self._since = time.perf_counter()


def checked(target: Target, leaks: Sequence[Leak]) -> list[Leak]:
    """The leaks without the padding after their texts; those that cannot be are refused."""
    texts = [_check(target, leak) for leak in leaks]
    if len({(text.kind, text.exposure, text.in_no_order) for text in texts}) > 1:
        raise InputError("expected leaks of one exposure, got several: recover each by itself")
    return texts


def _default(target: Target, leak: Leak) -> Attack:
    """The first attack of the registry that reads this leak."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if not names:
        kind = "a causal model" if target.parts.causal else "an encoder"
        order = " in no order" if leak.in_no_order else ""
        raise Unsuccessful(
            Status.NOT_APPLICABLE, f"no attack here reads {leak.exposure}{order} of {kind}"
        )
    return ATTACKS.make(names[0])


def _check(target: Target, leak: Leak) -> Leak:
    """Refuse a leak that cannot be this model's; drop the padding after the text."""
    if not isinstance(leak, tuple(TYPES.values())):
        names = ", ".join(kind.__name__ for kind in TYPES.values())
        raise InputError(f"expected a leak ({names}), got {type(leak).__name__}")
    parts = target.parts
    leak.exposure.block(parts)
    if leak.model is not None and leak.model != identity(target.model):
        raise InputError(
            f"expected a leak of the model {identity(target.model)}, got one of {leak.model}"
        )
    _check_shapes(target, leak)
    if leak.mask is None or leak.length is None:
        return leak
    text = int(leak.mask.nonzero().max()) + 1 if bool(leak.mask.any()) else 0
    if text == 0:
        raise InputError("expected a mask with text in it, got only padding")
    return leak.cut(text)


def _check_shapes(target: Target, leak: Leak) -> None:
    parts, length = target.parts, leak.length
    if length is not None and length > parts.max_length:
        raise InputError(f"expected at most {parts.max_length} positions, got {length}")
    width = leak.exposure.width or parts.width
    if width > parts.width:
        raise InputError(f"expected rows of at most {parts.width} numbers, got {width}")
    expected = {
        "hidden": (length, width),
        "attention": (length, parts.width),
        "kv": (parts.key_heads, length, parts.head_dim),
        "maps": (parts.heads, length, length),
        "pooled": (width,),
        "logits": (leak.exposure.steps, target.vocabulary),
    }[leak.kind]
    for name, tensor in leak.tensors.items():
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"expected {name} of {leak.exposure} with shape {expected}, "
                f"got {tuple(tensor.shape)}: is it another model's?"
            )


def _judged(target: Target, leak: Leak, proposal: Proposal, method: str) -> TextRecovery:
    verdict = judge(target, leak, proposal.ids)
    lost, status = _lost(target, leak, proposal.ids), verdict.status
    if lost and status is Status.RECOVERED:
        status = Status.INEXACT  # every token came back, but not every character
    short = ""
    if leak.kind == "pooled" and status in (Status.UNSOLVED, Status.MISMATCH):
        # One vector for a whole text, of all texts that there are: nothing was ruled out.
        status, short = Status.BUDGET, f"{NOT_ARRIVED}: {LEARN_MORE}"
    notes = (verdict.reason, *lost, short, proposal.note)
    return TextRecovery(
        status=status,
        reason="; ".join(note for note in notes if note),
        method=method,
        ids=proposal.ids,
        text=target.decode(proposal.ids),
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
        pieces=target.pieces(proposal.ids),
    )


def _lost(target: Target, leak: Leak, ids: list[int]) -> list[str]:
    """What the text had that its tokens do not hold."""
    notes: list[str] = []
    unknown = unknown_token(target.tokenizer)
    count = ids.count(unknown) if unknown is not None else 0
    if count:
        name = target.tokenizer.convert_ids_to_tokens(unknown)
        notes.append(f"{count} {name}: something stood there that the tokenizer has no token for")
    if leak.length == target.parts.max_length:
        notes.append(f"as long as the model's limit of {leak.length} tokens: probably cut off")
    return notes


def _ended(end: Unsuccessful, method: str) -> TextRecovery:
    return TextRecovery(
        status=end.status, reason=end.reason, method=method, ids=[], text="", verified=False,
        passes=0, seconds=0.0,
    )  # fmt: skip
