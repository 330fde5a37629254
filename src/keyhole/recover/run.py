"""`recover_text(model, tokenizer, leak)`: the right attack for the leak, then the judge.

Which attack reads which leak stands in registry.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError, expect_seed
from keyhole.core.files import read_text, trouble
from keyhole.core.journal import Journal, digest
from keyhole.core.machine import largest_matrix, threads_for
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.capture import Exposure
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded, identity
from keyhole.recover.attack import Attack, Proposal, Target, TokenCount, solvable
from keyhole.recover.files.arrays import Dump, arrays_of
from keyhole.recover.files.contents import Contents, contents_of
from keyhole.recover.files.sources import (
    Source,
    WrittenIds,
    head_for,
    open_leaks,
    read_sources,
    task_for,
)
from keyhole.recover.layers.judge import judge
from keyhole.recover.leaks import TYPES, Leak, load_leak
from keyhole.recover.pieces import unknown_token
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.registry import ATTACKS, WITH_CORPUS, readers
from keyhole.recover.served import with_served_noise
from keyhole.recover.simulate import degrade, leak_of, parse_forms, with_noise

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
    if length is not None and length > parts.longest:
        raise InputError(f"expected at most {parts.longest} positions, got {length}")
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
    if leak.length == target.parts.longest:
        notes.append(f"as long as the model's limit of {leak.length} tokens: probably cut off")
    return notes


def _ended(end: Unsuccessful, method: str) -> TextRecovery:
    return TextRecovery(
        status=end.status, reason=end.reason, method=method, ids=[], text="", verified=False,
        passes=0, seconds=0.0,
    )  # fmt: skip


# `keyhole capture` and `keyhole invert text` as functions: leaks made, and leaks read.
#
# Each comes as a list, when all is done, and as an iterator, which gives results as they come.


@dataclass(frozen=True, eq=False)
class LeakRead:
    """Leak `number` of a run, known by the digest of what is in it, and the text read from it.

    `before` says that an earlier run had read it.
    """

    number: int
    leak: str
    digest: str
    recovery: TextRecovery
    before: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"leak": self.leak, "digest": self.digest, **self.recovery.to_dict()}


def run(
    model: str | Loaded,
    leaks: Source | Sequence[Source],
    *,
    method: str | Attack | None = None,
    corpus: str | Path | None = None,
    noise: float | None = None,
    expose: str | Exposure | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    out: str | Path | None = None,
    track: Track = untracked,
) -> list[TextRecovery]:
    """The texts behind leaks of one exposure, in the order of the leaks.

    `model` is what the command line takes (a folder, a .gguf file, a name on the hub, `demo`) or a
    model that is loaded already; `leaks` are files, folders of files or leaks. `method` is a name
    of the registry or an attack with hyperparameters of your own; without one the leak decides.
    `corpus` is a file of texts like those that are looked for, where an attack counts one.
    `noise` is how strong the leaks' noise is known to be, in standard deviations of the leak.
    `expose` says what files of other programs, or arrays, hold: `hidden:3`, `kv:0`; without it,
    names and shapes tell, and which layer explains the numbers.
    `out` is the file that takes every result as it comes; leaks that are in it are not read again.
    """
    loaded, sources = model, read_sources(leaks)
    if isinstance(loaded, str):
        task = task_for(sources, expose)
        loaded = open_model(loaded, task=task, device=device, allow_pickle=allow_pickle)
    read = recovering_files(
        loaded, open_leaks(loaded, sources, expose), method=method, corpus=corpus, noise=noise,
        out=out, track=track,
    )  # fmt: skip
    return [text.recovery for text in sorted(read, key=lambda text: text.number)]


def recovering_files(
    loaded: Loaded,
    leaks: Source | Sequence[Source],
    *,
    method: str | Attack | None = None,
    corpus: str | Path | None = None,
    noise: float | None = None,
    expose: str | Exposure | None = None,
    out: str | Path | None = None,
    track: Track = untracked,
) -> Iterator[LeakRead]:
    """The same as they come: what an earlier run had read, then each text once it is recovered."""
    files = open_leaks(loaded, leaks, expose)
    names, opened = [file.name for file in files], [file.leak for file in files]
    if noise is not None:
        opened = [with_noise(leak, noise) for leak in opened]
    target = Target.of(loaded.model, loaded.tokenizer)
    checked(target, opened)  # before anything is written
    attack = _attack(target, opened[0], method, corpus)
    ids = [file.ids for file in files if file.ids is not None]
    written = attack is None and len(ids) == len(files)
    digests = [leak.digest for leak in opened]
    settings = method if isinstance(method, str | None) else repr(method)
    identity = {"run": "text recovery", "model": loaded.identity, "method": settings}
    if corpus is not None:
        identity["corpus"] = digest(read_text(corpus, "a corpus"))
    with Journal(out, identity) as journal, threads_for(largest_matrix(loaded.model)):
        overall = track("invert text", len(opened))
        fresh: list[int] = []
        for number, key in enumerate(digests):
            if key in journal:
                recovery = TextRecovery.from_dict(journal.records[key])
                yield LeakRead(number, names[number], key, recovery, before=True)
            else:
                fresh.append(number)
        texts = [opened[number] for number in fresh]
        finished = len(opened) - len(fresh)
        overall(finished)
        tokens = sum(leak.length or 0 for leak in texts)
        progress = track(f"tokens from {opened[0].exposure}", tokens or None)
        if written:
            attack = WrittenIds([ids[number] for number in fresh])
        for place, recovery in recovering(
            loaded.model, loaded.tokenizer, texts, method=attack, progress=progress, track=track
        ):
            number = fresh[place]
            read = LeakRead(number, names[number], digests[number], recovery)
            journal.add({read.digest: read.to_dict()})
            finished += 1
            overall(finished, note=Path(read.leak).name)
            yield read


def _attack(
    target: Target, leak: Leak, method: str | Attack | None, corpus: str | Path | None
) -> Attack | None:
    """The attack of that name, if it reads such a leak; None leaves the choice to the leak."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if method is None and corpus is not None:
        method = WITH_CORPUS
        if method not in names:
            raise InputError(f"expected no --corpus for {leak.exposure}: no attack on it reads one")
    if not isinstance(method, str):
        return method
    if ATTACKS[method].name not in names:
        kind = "a causal model" if target.parts.causal else "an encoder"
        known = " or ".join(names) or "none"
        raise InputError(f"expected --method {known} for {leak.exposure} of {kind}, got {method}")
    return ATTACKS.make(method, corpus=corpus)
