"""What leaks: the update that a client made of a batch of texts, and how it is made.

An update holds one tensor for each parameter that the client hands over: the gradient of its loss,
or, after several steps of its own, the difference of its weights. The rules of the exchange are
public, so the update states them; it has no field for the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.func import functional_call

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.files import parse, read_tensors, write_tensors
from keyhole.data import NO_LABEL, Example, opening
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import head_of, identity
from keyhole.recover.base_leak import FORMAT

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


# A batch of texts as tokens, with their classes, and the loss that a client takes of it.

_IGNORED = -100  # a token whose prediction is no part of the loss


@dataclass(frozen=True)
class Batch:
    """Token ids of each text, and each one's class where the task has classes."""

    texts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise InputError("expected texts of one token or more, got none")

    def __getitem__(self, number: int) -> Batch:
        """The batch of one of its texts."""
        return Batch((self.texts[number],), self.labels[number : number + 1])

    def padded(self, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and mask (b, n), padding after the texts."""
        longest = max(map(len, self.texts))
        ids = [[*text, *[pad] * (longest - len(text))] for text in self.texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in self.texts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def loss(model: Any, weights: Mapping[str, Tensor], batch: Batch, task: str, pad: int) -> Tensor:
    """The mean cross-entropy: of the texts' classes, or of all tokens but the first of each."""
    device = next(iter(weights.values())).device
    ids, mask = batch.padded(pad, device)
    given = {"input_ids": ids, "attention_mask": mask}
    logits = functional_call(model, dict(weights), kwargs=given).logits
    if task == "classification":
        labels = torch.tensor(batch.labels, device=device)
        return torch.nn.functional.cross_entropy(logits, labels)
    following = ids.masked_fill(mask == 0, _IGNORED)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten())


def expect_batch(batch: Batch, task: str, classes: int) -> None:
    """Refuse a batch that has no loss of this kind."""
    if task == "causal":
        short = [text for text in batch.texts if len(text) < 2]
        if short:
            raise InputError("expected texts of two tokens or more to predict one, got a shorter")
        return
    if classes < 2:
        raise InputError(f"expected a classifier of two classes or more, got {classes}")
    wrong = [label for label in batch.labels if not 0 <= label < classes]
    if wrong:
        raise InputError(f"expected classes from 0 to {classes - 1}, got {wrong[0]}")


# The client: how an update is made of a batch of texts, by the rules of the exchange.
#
# The same function makes a leak to try the attack on and tells the judge what a proposed batch
# would have given: what is compared is computed in one way. Dropout is off.

Weights = Mapping[str, Tensor]


def batch_of(model: Any, tokenizer: Any, examples: Sequence[Example], longest: int) -> Batch:
    """Texts as the model takes them; those that come without a class get the model's own answer."""
    texts: list[tuple[int, ...]] = []
    for example in examples:
        given = opening(example.text, longest)
        ids = tokenizer(given, truncation=True, max_length=longest)["input_ids"]
        if ids == tokenizer("")["input_ids"]:
            raise InputError(f"expected a text with a token in it, got {example.text[:40]!r}")
        texts.append(tuple(ids))
    task = task_for(model)
    labels: list[int] = []
    if task == "classification":
        for example, text in zip(examples, texts, strict=True):
            label = example.label
            if label == NO_LABEL:
                device = anatomy(model).device
                with torch.no_grad():
                    answers = model(input_ids=torch.tensor([text], device=device)).logits
                label = int(answers[0].argmax())
            labels.append(label)
    batch = Batch(tuple(texts), tuple(labels))
    expect_batch(batch, task, int(getattr(model.config, "num_labels", 0)))
    return batch


def task_for(model: Any) -> str:
    """What the loss of a model is: that of its head."""
    task = head_of(model)
    if task not in TASKS:
        raise InputError(
            "expected a model with a head for classes or for next tokens, which a loss needs, got "
            f"{type(model).__name__}"
        )
    return task


def update_of(
    model: Any,
    batch: Batch,
    protocol: Protocol | None = None,
    *,
    hide: Sequence[str] = (),
    precision: str = "float32",
    seed: int = 0,
) -> Update:
    """What a client hands over for a batch; `hide` leaves some parameters out."""
    protocol = protocol or Protocol()
    if precision not in PRECISIONS:
        raise InputError(f"expected --precision {' or '.join(PRECISIONS)}, got {precision}")
    given = noised(made(model, batch, protocol), protocol, len(batch.texts), seed)
    absent = hidden_parameters(model, hide)
    values = {
        name: tensor.to(PRECISIONS[precision]).cpu()
        for name, tensor in given.items()
        if name not in absent
    }
    task = task_for(model)
    whose = identity(model, head=True)
    return Update(values, task, len(batch.texts), protocol, precision, whose)


def made(model: Any, batch: Batch, protocol: Protocol) -> dict[str, Tensor]:
    """An update before noise: the gradient, or the difference of weights after several steps."""
    start = {name: each.detach() for name, each in model.named_parameters()}
    gradients = _gradients(model, start, batch, protocol.clip)
    if protocol.steps == 1:
        return gradients
    weights = start
    for step in range(protocol.steps):
        if step:
            gradients = _gradients(model, weights, batch, protocol.clip)
        weights = {
            name: each - protocol.rate * gradients[name] if name in gradients else each
            for name, each in weights.items()
        }
    return {name: weights[name] - start[name] for name in gradients}


def noised(
    values: dict[str, Tensor], protocol: Protocol, texts: int, seed: int
) -> dict[str, Tensor]:
    """The noise of DP-SGD: Gaussian, as strong for every number."""
    strength = noise_of(protocol, texts)
    if not strength:
        return values
    stream = torch.Generator().manual_seed(seed)
    return {
        name: tensor + strength * torch.randn(tensor.shape, generator=stream).to(tensor)
        for name, tensor in values.items()
    }


def noise_of(protocol: Protocol, texts: int) -> float:
    """The standard deviation of the noise in each number of an update."""
    if protocol.clip is None or not protocol.noise:
        return 0.0
    return protocol.noise * protocol.clip / texts * (protocol.rate if protocol.steps > 1 else 1.0)


def _gradients(model: Any, weights: Weights, batch: Batch, clip: float | None) -> dict[str, Tensor]:
    if clip is None:
        return gradient(model, weights, batch)
    total: dict[str, Tensor] = {}
    for number in range(len(batch.texts)):
        own = gradient(model, weights, batch[number])
        length = float(torch.stack([each.norm() for each in own.values()]).norm())
        share = min(1.0, clip / max(length, 1e-30)) / len(batch.texts)
        for name, each in own.items():
            total[name] = total[name] + share * each if name in total else share * each
    return total


def gradient(model: Any, weights: Weights, batch: Batch) -> dict[str, Tensor]:
    """The gradient of the batch's loss for each parameter that it depends on."""
    pad = getattr(model.config, "pad_token_id", None) or 0
    leaves = {name: each.detach().requires_grad_() for name, each in weights.items()}
    value = loss(model, leaves, batch, task_for(model), int(pad))
    # None for what the loss does not depend on, whatever the library's types say.
    given = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(value, list(leaves.values()), allow_unused=True),
    )
    return {name: each for name, each in zip(leaves, given, strict=True) if each is not None}


def hidden_parameters(model: Any, hide: Sequence[str]) -> set[str]:
    """The names of the parameters that are not handed over."""
    for what in hide:
        if what not in HIDDEN:
            raise InputError(f"expected --hide {' or '.join(HIDDEN)}, got {what}")
    if not hide:
        return set()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
