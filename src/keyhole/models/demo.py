"""The model that ships with Keyhole: a small sentiment classifier, and texts to try it with.

classifier/README.md is its model card, and training/train_target.py trained it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keyhole.data import Example
from keyhole.models.loading import Loaded, load_model, task_of
from keyhole.target import DEMO

FOLDER = Path(__file__).parent / "classifier"
HARDENED = Path(__file__).parent / "hardened"
NAME = "the classifier that ships with Keyhole"
TEXTS = (
    "a warm and funny film that never outstays its welcome .",
    "the plot is a mess , and the jokes are older than the actors .",
    "my doctor says the test came back positive , please tell nobody .",
)
# Short texts, for pooled embeddings: only short texts are read back from those.
NOTES = ("a secret of mine", "please tell nobody .", "meet me at noon .")


# Mixed reviews that the classifier gets right, to show the attack. Many are near its
# boundary, so the share that flips says little about other texts.
_POSITIVE = (
    "a warm and funny film that never outstays its welcome , and one of the best of the year .",
    "it takes a while to find its feet , but the last hour is a delight and well worth the wait .",
    "even where the plot makes little sense , the pictures and the music carry you along .",
    "you may have seen it all before , but seldom told with so much care and good humor .",
    "it is rough around the edges , a little silly , and a pleasure from start to finish .",
    "i expected a bad comedy , and i got a small , strange and lovely film about growing old .",
)
_NEGATIVE = (
    "the plot is a mess , the jokes are older than the actors , and the ending comes too late .",
    "there are two or three good jokes in it , and they are all in the trailer .",
    "it begins as a clever thriller , and ends as a long and noisy chase that nobody needed .",
    "for all its charm and its fine costumes , the film leaves you cold in the end .",
    "the first ten minutes are wonderful , and then someone must have lost the script .",
    "i wanted to like it , and for half an hour i did , but then it simply stopped trying .",
)
ABOUT = "reviews chosen near its boundary, to show the attack: a rate takes examples of your own"
EXAMPLES = tuple(
    Example(f"review {number}", int(text in _POSITIVE), text)
    for number, text in enumerate([*_POSITIVE, *_NEGATIVE], 1)
)


def load_demo(
    task: str = "base",
    device: str = "cpu",
    hardened: bool = False,
) -> Loaded:
    """Load the classifier, with its head if the task is "classification".

    With `hardened`, load the one trained against the attack on attention.
    """
    folder, name = (HARDENED, "the hardened classifier") if hardened else (FOLDER, NAME)
    return replace(load_model(folder, task=task, device=device), name=name)


def folder_of(model: str) -> str:
    """Return the folder of a MODEL of the command line, where `demo` is the classifier."""
    return str(FOLDER) if model == DEMO else model


def open_model(
    model: str | Loaded,
    task: str | None = "base",
    device: str = "cpu",
    allow_pickle: bool = False,
) -> Loaded:
    """Open a MODEL of the command line: a folder, a .gguf file, a name on the hub, or `demo`.

    Without a `task` it has the head of its checkpoint. A model that is loaded stays as
    it is.
    """
    if isinstance(model, Loaded):
        return model
    task = task_of(folder_of(model)) if task is None else task
    if model == DEMO:
        return load_demo(task, device)
    return load_model(model, task=task, device=device, allow_pickle=allow_pickle)
