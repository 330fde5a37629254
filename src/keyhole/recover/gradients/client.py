"""The client: how an update is made of a batch of texts, by the rules of the exchange.

The same function makes a leak to try the attack on and tells the judge what a proposed batch would
have given: what is compared is computed in one way. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.data import NO_LABEL, Example, opening
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import identity
from keyhole.models.tasks import head_of
from keyhole.recover.gradients.batch import Batch, expect_batch, loss
from keyhole.recover.gradients.update import HIDDEN, PRECISIONS, TASKS, Protocol, Update

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
