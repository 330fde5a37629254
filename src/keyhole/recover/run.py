"""Text from leaks: `recover_text` reads one leak, `run` files of them.

A leak is opened (files/) and checked against the model. The attack on its kind (registry.py)
proposes token ids, and the judge of its kind (judge.py) runs the model on them. The result is a
TextRecovery (recovery.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.files import read_text
from keyhole.core.journal import Journal, digest
from keyhole.core.machine import largest_matrix, threads_for
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.capture import Exposure
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded, identity
from keyhole.models.pairs import behind, decoder_of
from keyhole.models.pieces import unknown_token
from keyhole.recover.attack import Attack, Proposal, Target, TokenCount, solvable
from keyhole.recover.embeddings.judge import judge_vector
from keyhole.recover.files.arrays import Dump, arrays_of
from keyhole.recover.files.contents import opened_by, task_for
from keyhole.recover.files.sources import Opened, Sealed, Source, WrittenIds, read_sources
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.judge import judge_rows
from keyhole.recover.layers.key_values import CachedKeys
from keyhole.recover.layers.mixed import judge_mixed, unmixed
from keyhole.recover.leaks import TYPES, KeyValues, Leak, MixedCache
from keyhole.recover.originals import Original, Shared
from keyhole.recover.recovery import Judge, TextRecovery, Verdict
from keyhole.recover.registry import ATTACKS, WITH_CORPUS, readers
from keyhole.recover.simulate import MAX_LENGTH

NOT_ARRIVED = "the search ended before it came to the text, which proves nothing"
LEARN_MORE = "--corpus FILE, with more texts like those that are looked for, may read more"
_JUDGES: dict[str, Judge] = {"pooled": judge_vector, "mixed": judge_mixed}
_LIKELY = 4096  # tokens tried at a position where arrays may be of several layers


@dataclass(frozen=True, eq=False)
class LeakRead:
    """Leak `number` of a run, known by the digest of what is in it, and the text read from it.

    `before` says that an earlier run had read it; `exact` and `shared` how much of the true text
    came back, where that is known; `padding` is the id where an attack had nothing to say.
    """

    number: int
    leak: str
    digest: str
    recovery: TextRecovery
    before: bool = False
    padding: int | None = None
    exact: bool | None = None
    shared: Shared | None = None

    def to_dict(self) -> dict[str, Any]:
        known = {}
        if self.shared is not None:
            known = {
                "exact": self.exact, "token_f1": self.shared.f1, "names_read": self.shared.read,
                "names": self.shared.named,
            }  # fmt: skip
        return {"leak": self.leak, "digest": self.digest, **self.recovery.to_dict(), **known}


def run(
    model: str | Loaded,
    leaks: Source | Sequence[Source],
    *,
    method: str | Attack | None = None,
    corpus: str | Path | None = None,
    noise: float | None = None,
    expose: str | Exposure | None = None,
    truth: Sequence[str] | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    out: str | Path | None = None,
    track: Track = untracked,
    notify: Callable[[LeakRead], None] | None = None,
) -> list[TextRecovery]:
    """The texts behind leaks of one exposure, in the order of the leaks.

    `model` is what the command line takes (a folder, a .gguf file, a name on the hub, `demo`) or a
    model that is loaded already; `leaks` are files, folders of files or leaks. `method` is a name
    of the registry or an attack with hyperparameters of your own; without one the leak decides.
    `corpus` is a file of texts like those that are looked for, where an attack counts one.
    `noise` is how strong the leaks' noise is known to be, in standard deviations of the leak.
    `expose` says what files of other programs, or arrays, hold: `hidden:3`, `kv:0`; without it,
    names and shapes tell, and which layer explains the numbers. `truth` are the true texts, one for
    each leak. `out` is the file that takes every result as it comes; leaks that are in it are not
    read again. `notify` gets each text: first what `out` had, then each once it is recovered.
    """
    loaded, opened = open_leaks(model, leaks, expose, device=device, allow_pickle=allow_pickle)
    if noise is not None:
        opened = [replace(file, leak=file.leak.with_noise(noise)) for file in opened]
    target = _target(loaded.model, loaded.tokenizer, [file.leak for file in opened])
    texts = checked(target, [file.leak for file in opened])  # before anything is written
    attack = _named_attack(target, texts[0], method, corpus)
    originals = _originals(target, truth, len(opened))
    done: dict[int, TextRecovery] = {}

    def finish(number: int, recovery: TextRecovery, before: bool = False) -> None:
        done[number] = recovery
        if notify is None:
            return
        file, original, words = opened[number], originals[number], loaded.tokenizer
        padding = getattr(words, "pad_token_id", None)
        read = LeakRead(number, file.name, file.leak.digest, recovery, before, padding)
        if original is not None:
            ids = recovery.ids
            exact, shared = original.is_exactly(words, ids), original.shared(words, ids)
            read = replace(read, exact=exact, shared=shared)
        notify(read)

    with (
        Journal(out, _identity(loaded, method, corpus)) as journal,
        threads_for(largest_matrix(loaded.model)),
    ):
        overall = track("recover", len(opened))
        for number, file in enumerate(opened):
            if file.leak.digest in journal:
                recovery = journal.recall(file.leak.digest, TextRecovery.from_dict)
                finish(number, recovery, before=True)
        for number, file in enumerate(opened):
            if file.sealed:
                ((_, recovery),) = _recovering(target, [texts[number]], Sealed(file.sealed))
                finish(number, recovery)
        overall(len(done))
        if attack is None and all(file.ids is not None for file in opened):
            attack = WrittenIds([file.ids or () for n, file in enumerate(opened) if n not in done])
        fresh = {number: text for number, text in enumerate(texts) if number not in done}
        tokens = sum(leak.length or 0 for leak in fresh.values())
        progress = track(f"tokens from {texts[0].exposure}", tokens or None) if fresh else silent
        numbers = list(fresh)
        for place, recovery in _recovering(target, list(fresh.values()), attack, progress, track):
            number = numbers[place]
            file = opened[number]
            read = LeakRead(number, file.name, file.leak.digest, recovery)
            journal.add({read.digest: read.to_dict()})
            finish(number, recovery)
            overall(len(done), note=Path(file.name).name)
    return [done[number] for number in range(len(opened))]


def _identity(
    loaded: Loaded, method: str | Attack | None, corpus: str | Path | None
) -> dict[str, Any]:
    """What determines a run: a file of results of another one is refused."""
    settings = method if isinstance(method, str | None) else repr(method)
    identity = {"run": "text recovery", "model": loaded.identity, "method": settings}
    if corpus is not None:
        identity["corpus"] = digest(read_text(corpus, "a corpus"))
    return identity


def _originals(
    target: Target, truth: Sequence[str] | None, count: int
) -> Sequence[Original | None]:
    """The true texts as the model takes them, one for each leak."""
    if truth is None:
        return [None] * count
    if len(truth) != count:
        raise InputError(f"{count} leaks need {count} true texts, not {len(truth)}")
    max_length = min(MAX_LENGTH, target.parts.max_length)
    return [Original.of(target.tokenizer, text, max_length) for text in truth]


def _named_attack(
    target: Target, leak: Leak, method: str | Attack | None, corpus: str | Path | None
) -> Attack | None:
    """The attack of that name, if it reads such a leak; None leaves the choice to the leak."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if method is None and corpus is not None:
        method = WITH_CORPUS
        if method not in names:
            raise InputError(f"no attack on {leak.exposure} reads a corpus: leave --corpus out")
    if not isinstance(method, str):
        return method
    if ATTACKS[method].name not in names:
        known = " or ".join(names) or "none"
        raise InputError(
            f"{method} does not read {leak.exposure} of {_kind(target)}: choose {known}"
        )
    return ATTACKS.make(method, corpus=corpus)


def _kind(target: Target) -> str:
    return "a causal model" if target.parts.causal else "an encoder"


def open_leaks(
    model: str | Loaded,
    leaks: Source | Sequence[Source],
    expose: str | Exposure | None = None,
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
) -> tuple[Loaded, list[Opened]]:
    """The model, with the head that such leaks come from, and the leaks that the sources hold.

    What another program wrote may be read in several ways: one that gives a verified text counts.
    """
    sources, exposure = read_sources(leaks), _parsed(expose)
    if isinstance(model, str):
        task = task_for(sources, exposure)
        model = open_model(model, task=task, device=device, allow_pickle=allow_pickle)
    own = [source for source in sources if isinstance(source, Opened)]
    if len(own) == len(sources):
        return model, own
    target = Target.of(model.model, model.tokenizer)
    return model, opened_by(target, sources, exposure, _verifies)


def _parsed(expose: str | Exposure | None) -> Exposure | None:
    return Exposure.parse(expose) if isinstance(expose, str) else expose


def _verifies(target: Target, leak: Leak) -> bool:
    """Is there a text behind the leak that the judge verifies?

    Of a wrong reading no token fits, and the whole vocabulary would be gone through in vain.
    """
    likely = DecoderStates(most=_LIKELY)
    attack = CachedKeys(decoder=likely) if leak.kind == "kv" else likely
    left_to_right = target.parts.causal and leak.kind in ("hidden", "kv", "attention")
    try:
        found = _recovering(target, checked(target, [leak]), attack if left_to_right else None)
        ((_, recovery),) = found
    except InputError:
        return False
    return recovery.verified


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
        target, dump = Target.of(model, tokenizer), Dump("", arrays_of(leak))
        opened = opened_by(target, [dump], _parsed(expose), _verifies)
        if len(opened) > 1:
            raise InputError(f"the arrays hold {len(opened)} texts: use recover.run for several")
        leak = opened[0].leak
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


def recovering(
    model: Any,
    tokenizer: Any,
    leaks: Sequence[Leak],
    *,
    method: Attack | None = None,
    progress: Progress = silent,
    track: Track = untracked,
) -> Iterator[tuple[int, TextRecovery]]:
    """The same, one by one as they come: the number of the leak and its recovery.

    `progress` gets how many tokens fit so far, and of how many; `track` follows the parts of an
    attack that has any.
    """
    started = time.perf_counter()
    target = _target(model, tokenizer, leaks)
    yield from _recovering(target, checked(target, leaks), method, progress, track, started)


def _target(model: Any, tokenizer: Any, leaks: Sequence[Leak]) -> Target:
    """What leaked: the model, or the decoder behind the states that an encoder gave."""
    states = leaks[0].encoder if leaks and isinstance(leaks[0], tuple(TYPES.values())) else None
    if states is None:
        return Target.of(model, tokenizer)
    decoder = decoder_of(model)
    with behind(decoder, states):
        return Target.of(decoder, tokenizer)


def _recovering(
    target: Target,
    texts: Sequence[Leak],
    method: Attack | None = None,
    progress: Progress = silent,
    track: Track = untracked,
    started: float | None = None,
) -> Iterator[tuple[int, TextRecovery]]:
    if not texts:
        return
    if texts[0].encoder is not None:
        for number, text in enumerate(texts):
            with behind(target.model, cast("Tensor", text.encoder)):
                alone = [replace(text, encoder=None)]
                ((_, recovery),) = _recovering(target, alone, method, progress, track)
            yield number, recovery
        return
    if method is None and texts[0].kind == "kv":
        read = dict(_unmixed(target, texts, progress, track))
        yield from read.items()
        rest = [number for number in range(len(texts)) if number not in read]
        if read and rest:
            others, attack = [texts[number] for number in rest], _default_attack(target, texts[0])
            for place, recovery in _recovering(target, others, attack, progress, track):
                yield rest[place], recovery
        if read:
            return
    count, since = TokenCount(texts, progress), started or time.perf_counter()
    target = replace(target, count=count, track=track)
    left = set(range(len(texts)))
    name = "" if method is None else type(method).__name__
    judge = _JUDGES.get(texts[0].kind, judge_rows)
    try:
        attack = method or _default_attack(target, texts[0])
        name = type(attack).__name__
        with solvable(target.model):
            for number, proposal in attack(target, texts):
                recovery = _judged(judge, target, texts[number], proposal, name)
                left.discard(number)
                count.set(number, len(recovery.ids))
                yield number, replace(recovery, seconds=time.perf_counter() - since)
                since = time.perf_counter()
    except Unsuccessful as end:
        seconds = (time.perf_counter() - since) / max(1, len(left))
        for number in sorted(left):
            yield number, TextRecovery(end.status, end.reason, name, [], "", False, 0, seconds)


def _unmixed(
    target: Target, texts: Sequence[Leak], progress: Progress, track: Track
) -> Iterator[tuple[int, TextRecovery]]:
    """Those of leaked caches that are behind a secret mix, as far as that gave a text."""
    for number, text in enumerate(texts):
        mixed = unmixed(target, text) if isinstance(text, KeyValues) else None
        if mixed is not None:
            ((_, recovery),) = _recovering(target, [mixed], None, progress, track)
            if recovery.status in (Status.RECOVERED, Status.INEXACT, Status.BUDGET):
                yield number, recovery


def _default_attack(target: Target, leak: Leak) -> Attack:
    """The first attack of the registry that reads this leak."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if not names:
        order = " in no order" if leak.in_no_order else ""
        raise Unsuccessful(
            Status.NOT_APPLICABLE, f"no attack reads {leak.exposure}{order} of {_kind(target)}"
        )
    return ATTACKS.make(names[0])


def _judged(
    judge: Judge, target: Target, leak: Leak, proposal: Proposal, method: str
) -> TextRecovery:
    ids = proposal.ids
    if not ids or len(ids) != (leak.length or len(ids)):
        reason = f"{len(ids)} tokens proposed for {leak.length} positions"
        verdict = Verdict.without_fit(Status.UNSOLVED, reason, len(ids))
    else:
        verdict = judge(target, leak, ids)
    lost, status = _lost(target, leak, ids), verdict.status
    if lost and status is Status.RECOVERED:
        status = Status.INEXACT  # every token came back, but not every character
    short = ""
    if status is Status.UNSOLVED and proposal.excluded and (verdict.residual or 0) > 1:
        status, short = Status.MISMATCH, proposal.excluded
    if leak.kind == "pooled" and status in (Status.UNSOLVED, Status.MISMATCH):
        # One vector for a whole text, of all texts that there are: nothing was ruled out.
        status, short = Status.BUDGET, f"{NOT_ARRIVED}: {LEARN_MORE}"
    notes = (verdict.reason, *lost, short, proposal.note)
    return TextRecovery(
        status=status,
        reason="; ".join(note for note in notes if note),
        method=method,
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


def checked(target: Target, leaks: Sequence[Leak]) -> list[Leak]:
    """The leaks without the padding after their texts; those that cannot be are refused."""
    texts = [_check(target, leak) for leak in leaks]
    same = {(text.kind, text.exposure, text.in_no_order, text.encoder is None) for text in texts}
    if len(same) > 1:
        raise InputError("the leaks are of several exposures: recover each by itself")
    return texts


def _check(target: Target, leak: Leak) -> Leak:
    """Refuse a leak that cannot be this model's; drop the padding after the text."""
    if not isinstance(leak, tuple(TYPES.values())):
        names = ", ".join(kind.__name__ for kind in TYPES.values())
        raise InputError(f"expected a leak ({names}), got {type(leak).__name__}")
    leak.exposure.block(target.parts)
    if leak.model is not None and leak.model != identity(target.model):
        raise InputError(
            f"the leak is of the model {leak.model}, and this is {identity(target.model)}"
        )
    _check_shapes(target, leak)
    if leak.mask is None or leak.length is None:
        return leak
    if not bool(leak.mask.any()):
        raise InputError("the mask is only padding: there is no text")
    return leak.cut(int(leak.mask.nonzero().max()) + 1)


def _check_shapes(target: Target, leak: Leak) -> None:
    parts, length = target.parts, leak.length
    if isinstance(leak, MixedCache):
        length = leak.keys.shape[1]
    elif length is not None and length > parts.max_length:
        raise InputError(
            f"the leak has {length} positions, and the model takes at most {parts.max_length}"
        )
    width = leak.exposure.width or parts.width
    if width > parts.width:
        raise InputError(f"the rows have {width} numbers, and the model is {parts.width} wide")
    of_kind = {
        "hidden": (length, width),
        "attention": (length, parts.width),
        "kv": (parts.key_heads, length, parts.head_dim),
        "mixed": (parts.key_heads, length, parts.head_dim),
        "maps": (parts.heads, length, length),
        "pooled": (width,),
        "logits": (1, target.vocabulary),
    }[leak.kind]
    cache = leak.kind in ("kv", "mixed")
    kept = parts.cached.get(leak.exposure.block(parts)) if cache else None
    names = ("keys", "values") if kept else ()
    cached = {
        name: (size[1], length, size[3]) for name, size in zip(names, kept or (), strict=True)
    }
    for name, tensor in leak.tensors.items():
        expected = cached.get(name, of_kind)
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"expected {name} of {leak.exposure} with shape {expected}, "
                f"got {tuple(tensor.shape)}: is it another model's?"
            )
