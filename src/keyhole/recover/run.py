"""`keyhole lab capture` and `keyhole recover` as functions: leaks made, and leaks read.

Each comes as a list, when all is done, and as an iterator, which gives results as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError, expect_seed
from keyhole.core.files import read_text, trouble
from keyhole.core.journal import Journal, digest
from keyhole.core.machine import largest_matrix, threads_for
from keyhole.core.progress import Track, untracked
from keyhole.models.capture import Exposure
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Attack, Target
from keyhole.recover.foreign import WrittenIds
from keyhole.recover.leaks import Leak, load_leak
from keyhole.recover.recover_text import checked, recovering
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.registry import ATTACKS, WITH_CORPUS, readers
from keyhole.recover.simulate import degrade, leak_of, parse_forms, with_noise
from keyhole.recover.sources import Source, head_for, open_leaks, read_sources, task_for

UNFINISHED = "capture.journal"  # in a folder of leaks, until all of them are there


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
                recovery = journal.recall(key, TextRecovery.from_dict)
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


def capture(
    model: str | Loaded,
    texts: str | Sequence[str],
    expose: str | Exposure,
    *,
    out: str | Path = "leak.safetensors",
    precision: str = "float32",
    noise: float = 0.0,
    forms: Sequence[str] = (),
    device: str = "cpu",
    allow_pickle: bool = False,
    force: bool = False,
    seed: int = 0,
) -> list[Path]:
    """Run a model on texts and write down what it would leak, to hand to an attacker.

    `expose` is `hidden:3`, `kv:0`, `maps:1`, `attention:1`, `pooled`, `logits` or `logits:4`. `out`
    is the file, or a folder where there are several texts. The leak takes the `forms` that
    `degrade` knows, and is rounded to `precision` after noise of `noise` times its standard
    deviation was added. A folder remembers in a journal which leaks are in it until all of them
    are; `force` replaces the journal of another run.
    """
    return [
        path
        for path, _ in capturing(
            model, texts, expose, out=out, precision=precision, noise=noise, forms=forms,
            device=device, allow_pickle=allow_pickle, force=force, seed=seed,
        )
    ]  # fmt: skip


def capturing(
    model: str | Loaded,
    texts: str | Sequence[str],
    expose: str | Exposure,
    *,
    out: str | Path = "leak.safetensors",
    precision: str = "float32",
    noise: float = 0.0,
    forms: Sequence[str] = (),
    device: str = "cpu",
    allow_pickle: bool = False,
    force: bool = False,
    seed: int = 0,
) -> Iterator[tuple[Path, Leak]]:
    """The same as they come: each leak and the file that holds it."""
    expect_seed(seed)
    parse_forms(forms)
    exposure = Exposure.parse(expose) if isinstance(expose, str) else expose
    texts = [texts] if isinstance(texts, str) else list(texts)
    paths = files_of(Path(out), len(texts))
    loaded = model
    if isinstance(loaded, str):
        loaded = open_model(
            loaded, task=head_for(exposure.kind), device=device, allow_pickle=allow_pickle
        )
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise trouble("a folder to write to", paths[0].parent, error) from error
    run: dict[str, Any] = {
        "run": "capture", "model": loaded.identity, "exposure": str(exposure),
        "precision": precision, "noise": noise, "seed": seed, "texts": digest(texts),
    }  # fmt: skip
    if forms:
        run["forms"] = list(forms)
    unfinished = paths[0].parent / UNFINISHED if len(texts) > 1 else None
    with Journal(unfinished, run, force=force) as journal:
        for number, (text, path) in enumerate(zip(texts, paths, strict=True)):
            if path.name in journal and path.exists():
                yield path, load_leak(path)
                continue
            leak = leak_of(loaded.model, loaded.tokenizer, text, exposure)
            leak = degrade(leak, precision, noise, seed + number, forms)
            leak.save(path)
            journal.add({path.name: {}})
            yield path, leak
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)


def files_of(out: Path, count: int) -> list[Path]:
    """The files that so many leaks are written to."""
    if count == 0:
        raise InputError("expected one text or more, got none")
    if count == 1:
        return [out]
    if out.suffix:
        raise InputError(f"expected a folder for {count} leaks, got {out}")
    return [out / f"leak-{number:04d}.safetensors" for number in range(count)]
