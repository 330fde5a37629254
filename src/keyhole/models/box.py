"""The target in the box: a small sentiment classifier, and texts to try it with.

classifier/README.md is its card, training/train_target.py the script that made it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keyhole.models.loading import Loaded, load_model

FOLDER = Path(__file__).parent / "classifier"
TEXTS = (
    "a warm and funny film that never outstays its welcome .",
    "the plot is a mess , and the jokes are older than the actors .",
    "my doctor says the test came back positive , please tell nobody .",
)


def load_box(task: str = "base", device: str = "cpu") -> Loaded:
    """The classifier, with or without its head on top (`task="classification"`)."""
    return replace(load_model(FOLDER, task=task, device=device), name="the classifier in the box")
