"""What leaks: the update that a client made of a batch of texts, and how it is made.

An update holds one tensor for each parameter that the client hands over: the gradient of its loss,
or, after several steps of its own, the difference of its weights. The rules of the exchange are
public, so the update states them; it has no field for the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.files import parse, read_tensors, write_tensors
from keyhole.recover.leaks import FORMAT

KIND = "gradient"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TASKS = ("classification", "causal")
HIDDEN = ("embeddings",)


@dataclass(frozen=True)
class Protocol:
    """The rules by which a client makes its update of a batch.

    With `clip`, each text's own gradient is scaled down to that length at most, and noise of
    `noise` times that length is added to their sum (DP-SGD, arXiv 1607.00133). With `steps` above
    one, the client takes so many steps of gradient descent of size `rate` on the same batch, and
    hands over the difference of its weights.
    """

    clip: float | None = None
    noise: float = 0.0
    steps: int = 1
    rate: float = 0.01

    def __post_init__(self) -> None:
        expect_number("--clip", self.clip, above=0)
        expect_number("--noise", self.noise, least=0)
        expect_count("--local-steps", self.steps)
        expect_number("--rate", self.rate, above=0)
        if self.noise and self.clip is None:
            raise InputError(
                "expected --clip with --noise: the noise of a gradient is measured in the length "
                "that each text's own is clipped to"
            )


@dataclass(frozen=True, eq=False)
class Update:
    """One tensor for each parameter that was handed over, by its name in the model.

    `texts` is the size of the batch. `task` says what the loss is: the cross-entropy of classes, or
    of each next token. `precision` is how the numbers were rounded, `model` the identity of the
    model (with its head) that they are of; None where that is unknown.
    """

    values: Mapping[str, Tensor]
    task: str
    texts: int
    protocol: Protocol = field(default_factory=Protocol)
    precision: str = "float32"
    model: str | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InputError(f"expected a task among {', '.join(TASKS)}, got {self.task!r:.40}")
        expect_count("the number of texts", self.texts)
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(f"expected a precision among {known}, got {self.precision!r:.40}")
        if not self.values:
            raise InputError("expected the gradient of one parameter or more, got none")
        for name, tensor in self.values.items():
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise InputError(f"expected finite numbers in the gradient of {name}, got others")

    @property
    def what(self) -> str:
        """What was handed over, in words."""
        return "difference of weights" if self.protocol.steps > 1 else "gradient"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of what is in it, whatever its file is called."""
        sum_ = hashlib.sha256(json.dumps(self._about(), sort_keys=True).encode())
        for name, tensor in sorted(self.values.items()):
            sum_.update(f"{name} {tuple(tensor.shape)}".encode())
            sum_.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return sum_.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write it as .safetensors: a whole file or none."""
        about = {"keyhole": FORMAT, "leak": KIND, "about": json.dumps(self._about())}
        write_tensors(path, self.values, about)

    def _about(self) -> dict[str, Any]:
        return {
            "task": self.task, "texts": self.texts, "protocol": asdict(self.protocol),
            "precision": self.precision, "model": self.model,
        }  # fmt: skip


def is_update(path: str | Path) -> bool:
    """Is this file an update, rather than a leak of one text? Its tensors are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("leak") == KIND
    except (OSError, SafetensorError):
        return False  # whoever reads it says why it cannot be read


def load_update(path: str | Path) -> Update:
    """Read what `save` wrote, or say in one line why it is something else."""
    metadata, tensors = read_tensors(path, "a file of gradients")
    if metadata.get("keyhole") != FORMAT or metadata.get("leak") != KIND:
        raise InputError(f"expected a file of gradients written by Keyhole, got {path}")
    try:
        about: dict[str, Any] = parse(metadata["about"])
        protocol = Protocol(**about.pop("protocol"))
        return Update(tensors, protocol=protocol, **about)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"expected a file of gradients written by Keyhole, got {path}: {error}"
        ) from error
