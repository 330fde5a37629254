"""What an audit has checked so far, on disk: the same audit goes on from there.

The file is a journal (resume.py): a first line with everything that the findings follow from, then
one record for each check that is done. A check that the target did not answer is not written down:
it is made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from keyhole.audit.check import Check, Checked, joined
from keyhole.audit.stores import StoreTarget
from keyhole.audit.targets import Target
from keyhole.audit.texts import TextTarget
from keyhole.core import environment
from keyhole.core.journal import Journal, Run, digest, stopping_on_ctrl_c
from keyhole.core.progress import Expecting, Track
from keyhole.core.tasks import Runner, Task
from keyhole.models.loading import identity
from keyhole.recover.attack import Counts
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.report import words

Resuming = Callable[[int, int], None]  # told how many checks are done, of how many


def what_determines(target: Target, seed: int, only: Sequence[str] = ()) -> Run:
    """Everything that the findings of an audit follow from."""
    return {
        "run": "audit",
        "keyhole": environment()["keyhole"],
        "target": target.identity,
        "seed": seed,
        "exposures": list(only) or "all",
        **{name or "model": _model(model) for name, model in target.models.items()},
        **{name: _store(store) for name, store in target.stores.items()},
    }


def _store(target: StoreTarget) -> dict[str, Any]:
    return {
        "weights": identity(target.loaded.model),
        "pooling": str(target.pooling),
        "longest text": target.longest,
        "method": _method(target),
        "texts": len(target.rows),
        "data": digest(list(target.rows), list(target.texts), _bytes(target.vectors)),
        "device": next(target.loaded.model.parameters()).device.type,
    }


def _bytes(vectors: Tensor) -> bytes:
    return vectors.double().contiguous().numpy().tobytes()


def _method(target: StoreTarget) -> Any:
    method = target.method
    if isinstance(method, Counts):
        return method.settings
    return repr(method)


def _model(target: TextTarget) -> dict[str, Any]:
    loaded, twin = target.loaded, target.twin
    examples = [asdict(example) for example in target.examples]
    return {
        "weights": identity(loaded.model, head=True),
        "hardened twin": None if twin is None else identity(twin.model, head=True),
        "layers": target.layers if target.layers in (None, "all") else list(target.layers),
        "precisions": list(target.precisions),
        "texts": len(target.texts),
        "examples": len(examples),
        "data": digest(list(target.texts), list(target.notes), examples),
        "corpus": digest(corpus_texts(target.corpus or SHIPPED)),
        "device": next(loaded.model.parameters()).device.type,
    }


def make_all(
    checks: Mapping[str, Check],
    journal: Journal,
    track: Track,
    resuming: Resuming,
    crew: Runner | None = None,
) -> tuple[Checked, float]:
    """What all checks give, and the seconds they took; those in the journal are not made again.

    With a crew, checks that other processes can make are made there, side by side.
    """
    made = {key: recalled(journal, key) for key in checks if key in journal}
    progress = track("audit", total=len(checks))
    if made:
        resuming(len(made), len(checks))
        progress(len(made))
    todo = {key: check for key, check in checks.items() if key not in made}
    began, worked = time.monotonic(), 0.0
    for key, checked, took in _making(todo, track, crew):
        remember(journal, key, checked, took)
        made[key] = checked, took
        worked += checks[key].weight
        if worked and isinstance(progress, Expecting):
            ahead = sum(check.weight for other, check in checks.items() if other not in made)
            progress.expect((time.monotonic() - began) * ahead / worked)
        progress(len(made), note=words.in_full(checks[key].exposure))
    return joined(made[key][0] for key in checks), sum(took for _, took in made.values())


def _making(
    todo: Mapping[str, Check], track: Track, crew: Runner | None
) -> Iterator[tuple[str, Checked, float]]:
    """Each check with what it gave and the seconds that it took, as they are done."""
    for key, check in todo.items():
        if crew is None or check.elsewhere is None:
            started = time.perf_counter()
            with stopping_on_ctrl_c():
                checked = check.run(track)
            yield key, checked, time.perf_counter() - started
        else:
            crew.add(Task(key, check.elsewhere()))
    for done in () if crew is None else crew.run():
        if done.error is not None:
            raise done.error
        yield done.task.key, done.value, done.seconds


def remember(journal: Journal, key: str, checked: Checked, seconds: float) -> None:
    """Write down a check, unless the target did not answer: then it is worth another try."""
    if checked.answered:
        journal.add({key: {**checked.to_dict(), "seconds": seconds}})


def recalled(journal: Journal, key: str) -> tuple[Checked, float]:
    """What a check gave in an earlier run, and the seconds that it took."""
    return journal.recall(key, lambda r: (Checked.from_dict(r), float(r["seconds"])))
