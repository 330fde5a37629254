"""`run` reads files of leaks, `recover_text` reads one leak.

`open_leaks` opens the model and the leaks (files/). The attack on their kind
(registry.py) proposes token ids, and a judge runs the model on them (texts.py). Each
result is a `TextRecovery` (recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError
from keyhole.core.files import read_text
from keyhole.core.journal import Journal, digest
from keyhole.core.machine import largest_matrix, threads_for
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.models.capture import Exposure
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Attack, Target
from keyhole.recover.files.arrays import Dump, arrays_of
from keyhole.recover.files.contents import (
    Opened,
    Sealed,
    Source,
    WrittenIds,
    opened_by,
    read_sources,
    task_for,
)
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.key_values import CachedKeys
from keyhole.recover.leaks import TYPES, Leak
from keyhole.recover.originals import Original, Shared
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.registry import ATTACKS, WITH_CORPUS, readers
from keyhole.recover.simulate import MAX_LENGTH
from keyhole.recover.texts import checked_leaks, recover_each, recover_texts, target_of

# tokens tried at a position while it is open which layer the arrays are of
_LIKELY = 4096


@dataclass(frozen=True, eq=False)
class LeakRead:
    """Leak `number` of a run, with the digest of its contents, and the text read from it.

    `before` is true if an earlier run had read it. `exact` and `shared` compare the
    text with the true one, if that is known. `padding` is the id at positions where an
    attack had no proposal.
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
        compared: dict[str, Any] = {}
        if self.shared is not None:
            compared = {
                "exact": self.exact,
                "token_f1": self.shared.f1,
                "names_read": self.shared.read,
                "names": self.shared.named,
            }
        return {
            "leak": self.leak,
            "digest": self.digest,
            **self.recovery.to_dict(),
            **compared,
        }


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
    """Recover the texts of leaks of one exposure, in the order of the leaks.

    `model` is loaded, or a folder, a .gguf file, a name on the hub or `demo`. `leaks`
    are files, folders of files, leaks or arrays. `method` is a name of the registry or
    an attack; without it the leak decides. `corpus` is a file of texts like those to be
    found, for an attack that learns from one. `noise` is the known strength of the
    leaks' noise, in standard deviations of the leak. `expose` says what arrays and
    files of other programs hold (`hidden:3`, `kv:0`); without it, that is inferred.
    `truth` are the true texts, one for each leak. Every result is appended to the file
    `out`, and leaks that it holds already are not read again. `notify` gets the results
    that need no attack (from `out`, or of encrypted files), then each new one.
    """
    loaded, opened = open_leaks(
        model, leaks, expose, device=device, allow_pickle=allow_pickle
    )
    if noise is not None:
        opened = [replace(file, leak=file.leak.with_noise(noise)) for file in opened]
    target = target_of(loaded.model, loaded.tokenizer, [file.leak for file in opened])
    texts = checked_leaks(
        target, [file.leak for file in opened]
    )  # before anything is written
    attack = _named_attack(target, texts[0], method, corpus)
    originals = _originals(target, truth, len(opened))
    done: dict[int, TextRecovery] = {}

    def read_of(
        number: int,
        recovery: TextRecovery,
        before: bool = False,
    ) -> LeakRead:
        file = opened[number]
        return LeakRead(number, file.name, file.leak.digest, recovery, before)

    def finish(read: LeakRead) -> None:
        done[read.number] = read.recovery
        if notify is not None:
            notify(_compared(read, originals[read.number], loaded.tokenizer))

    with (
        Journal(out, _identity(loaded, method, corpus)) as journal,
        threads_for(largest_matrix(loaded.model)),
    ):
        overall = track("recover", len(opened))
        for number, file in enumerate(opened):
            if file.leak.digest in journal:
                recovery = journal.recall(file.leak.digest, TextRecovery.from_dict)
                finish(read_of(number, recovery, before=True))
            elif file.sealed:
                sealed = recover_each(
                    target, {number: texts[number]}, Sealed(file.sealed)
                )
                finish(read_of(*next(sealed)))
        overall(len(done))
        fresh = {
            number: text for number, text in enumerate(texts) if number not in done
        }
        if attack is None and all(file.ids is not None for file in opened):
            attack = WrittenIds([opened[number].ids or () for number in fresh])
        tokens = sum(leak.length or 0 for leak in fresh.values())
        if fresh:
            progress = track(f"tokens from {texts[0].exposure}", tokens or None)
        else:
            progress = silent
        target = replace(target, progress=progress, track=track)
        for number, recovery in recover_each(target, fresh, attack):
            read = read_of(number, recovery)
            journal.add({read.digest: read.to_dict()})
            finish(read)
            overall(len(done), note=Path(read.leak).name)
    return [done[number] for number in range(len(opened))]


def _compared(
    read: LeakRead,
    original: Original | None,
    tokenizer: Any,
) -> LeakRead:
    """Return what was read with the padding id, and a comparison with the true text if known."""
    read = replace(read, padding=getattr(tokenizer, "pad_token_id", None))
    if original is None:
        return read
    ids = read.recovery.ids
    exact = original.is_exactly(tokenizer, ids)
    shared = original.shared(tokenizer, ids)
    return replace(read, exact=exact, shared=shared)


def _identity(
    loaded: Loaded,
    method: str | Attack | None,
    corpus: str | Path | None,
) -> dict[str, Any]:
    """Return what determines the results: an `out` file of another run is refused."""
    settings = method if isinstance(method, str | None) else repr(method)
    identity = {"run": "text recovery", "model": loaded.identity, "method": settings}
    if corpus is not None:
        identity["corpus"] = digest(read_text(corpus, "a corpus"))
    return identity


def _originals(
    target: Target,
    truth: Sequence[str] | None,
    count: int,
) -> Sequence[Original | None]:
    """Return the true texts as the model takes them, one for each leak."""
    if truth is None:
        return [None] * count
    if len(truth) != count:
        raise InputError(f"{count} leaks need {count} true texts, not {len(truth)}")
    max_length = min(MAX_LENGTH, target.parts.max_length)
    return [Original.of(target.tokenizer, text, max_length) for text in truth]


def _named_attack(
    target: Target,
    leak: Leak,
    method: str | Attack | None,
    corpus: str | Path | None,
) -> Attack | None:
    """Return the attack of that name if it reads such a leak; None leaves the choice open."""
    names = readers(leak.kind, target.parts.causal, leak.in_no_order)
    if method is None and corpus is not None:
        method = WITH_CORPUS
        if method not in names:
            raise InputError(
                f"no attack on {leak.exposure} reads a corpus: leave --corpus out"
            )
    if not isinstance(method, str):
        return method
    if ATTACKS[method].name not in names:
        known = " or ".join(names) or "none"
        raise InputError(
            f"{method} does not read {leak.exposure} of {target.kind}: choose {known}"
        )
    return ATTACKS.make(method, corpus=corpus)


def open_leaks(
    model: str | Loaded,
    leaks: Source | Sequence[Source],
    expose: str | Exposure | None = None,
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
) -> tuple[Loaded, list[Opened]]:
    """Open the model, with the head that such leaks need, and the leaks of all sources.

    Arrays may be readable in several ways; the reading that gives a verified text
    counts.
    """
    sources = read_sources(leaks)
    exposure = None if expose is None else Exposure.parse(expose)
    model = open_model(model, task_for(sources, exposure), device, allow_pickle)
    own = [source for source in sources if isinstance(source, Opened)]
    if len(own) == len(sources):
        return model, own
    target = Target.of(model.model, model.tokenizer)
    return model, opened_by(target, sources, exposure, _verifies)


def _verifies(target: Target, leak: Leak) -> bool:
    """Return whether a text of this leak is found that the judge verifies.

    With a wrong reading no token fits, so a left-to-right search tries only the
    likeliest.
    """
    likely = DecoderStates(most=_LIKELY)
    attack = CachedKeys(decoder=likely) if leak.kind == "kv" else likely
    left_to_right = target.parts.causal and leak.kind in ("hidden", "kv", "attention")
    try:
        text = dict(enumerate(checked_leaks(target, [leak])))
        ((_, recovery),) = recover_each(target, text, attack if left_to_right else None)
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
    """Recover the text of a leak, verified by running the model on it.

    `leak` may also be an array of NumPy or torch, or several by name. `expose` says
    what it holds (`hidden:3`); without it, that is inferred from its shape and its
    numbers.
    """
    if not isinstance(leak, tuple(TYPES.values())):
        target = Target.of(model, tokenizer)
        dump = Dump("", arrays_of(leak))
        opened = opened_by(
            target,
            [dump],
            None if expose is None else Exposure.parse(expose),
            _verifies,
        )
        if len(opened) > 1:
            raise InputError(
                f"the arrays hold {len(opened)} texts: use recover.run for several"
            )
        leak = opened[0].leak
    return recover_texts(model, tokenizer, [leak], method=method, progress=progress)[0]
