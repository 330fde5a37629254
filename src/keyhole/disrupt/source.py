"""Where a model is found: workers load it themselves, and a run is known by what is there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.core.journal import digest
from keyhole.models.loading import load_config, load_model


@dataclass(frozen=True)
class ModelSource:
    """Where a worker finds the model: it is loaded once a process, not sent."""

    name: str
    task: str = "classification"
    device: str = "cpu"
    longest: int | None = None
    allow_pickle: bool = False

    def load(self) -> tuple[Any, Any]:
        loaded = load_model(
            self.name, task=self.task, device=self.device, allow_pickle=self.allow_pickle
        )
        return loaded.model, loaded.tokenizer

    def identity(self) -> str:
        """Sixteen hexadecimal digits of the checkpoint's files, or of its commit on the hub.

        Not of the loaded model: with a pool, only the workers load it.
        """
        path = Path(self.name)
        if path.is_file():
            return digest(_summed(path))
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if file.is_file()]
            return digest({file.name: _summed(file) for file in files if _computes(file)})
        commit = getattr(load_config(self.name), "_commit_hash", None)
        return digest([self.name, commit])


# What a checkpoint computes with; a card or a report next to it changes nothing.
_PARTS = (".safetensors", ".bin", ".gguf", ".txt", ".model")
_CONFIGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
            "vocab.json", "added_tokens.json")  # fmt: skip


def _computes(file: Path) -> bool:
    return file.suffix in _PARTS or file.name in _CONFIGS


def _summed(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
