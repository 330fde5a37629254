"""`keyhole capture --expose gradient` and `keyhole invert text` on such files, as functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from keyhole.core.errors import expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.data import Example
from keyhole.models.anatomy import anatomy
from keyhole.models.demo import folder_of, open_model
from keyhole.models.loading import Loaded, task_of
from keyhole.recover.gradients.client import batch_of, update_of
from keyhole.recover.gradients.recover_batch import recover_batch
from keyhole.recover.gradients.recovery import BatchRecovery
from keyhole.recover.gradients.update import Protocol, Update, load_update

LONGEST = 512  # tokens of a text that a gradient is made of


def capture_update(
    model: str | Loaded,
    examples: Sequence[Example],
    *,
    out: str | Path,
    protocol: Protocol | None = None,
    hide: Sequence[str] = (),
    precision: str = "float32",
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
) -> Update:
    """Write down what a client would hand over for one batch of texts.

    `model` is what the command line takes, or one that is loaded with its head. Texts without a
    class get the one that the model itself gives. `hide` leaves out the gradients of `embeddings`.
    """
    expect_seed(seed)
    loaded = opened(model, device, allow_pickle)
    longest = min(LONGEST, anatomy(loaded.model).longest)
    batch = batch_of(loaded.model, loaded.tokenizer, examples, longest)
    update = update_of(loaded.model, batch, protocol, hide=hide, precision=precision, seed=seed)
    update.save(out)
    return update


def recovering_updates(
    model: str | Loaded,
    files: Sequence[str | Path],
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
    track: Track = untracked,
) -> Iterator[tuple[Path, BatchRecovery]]:
    """The batch behind each file of gradients, one by one."""
    loaded = opened(model, device, allow_pickle)
    overall = track("invert text", len(files))
    for number, file in enumerate(files, 1):
        update = load_update(file)
        yield Path(file), recover_batch(loaded.model, loaded.tokenizer, update)
        overall(number, note=Path(file).name)


def opened(model: str | Loaded, device: str, allow_pickle: bool) -> Loaded:
    """The model with the head that its loss is taken of."""
    if not isinstance(model, str):
        return model
    task = task_of(folder_of(model))
    return open_model(model, task=task, device=device, allow_pickle=allow_pickle)
