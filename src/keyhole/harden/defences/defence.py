"""What every training defence is, and the pieces they share.

A defence gives the losses of one batch, one after the other; the caller differentiates each before
it asks for the next:

    for loss in defence.losses(model, batch, labels, stream):
        loss.backward()

FreeLB has one for each step of its ascent: its next step is the gradient that this very backward
pass leaves at the perturbation, so an ascent of K steps costs K passes, not 2K. ASA and the
attack's masks have two, the clean one and the other, so that one graph is held at a time.

`batch` holds what the model takes, (b, n) or (b, choices, n), and may hold `special_tokens_mask`,
which is not given to the model. All randomness comes from `stream`, that of dropout too: passes
that are compared must drop the same units, or a perturbation of radius zero would change answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_number

Batch = Mapping[str, Tensor]
SPECIAL = "special_tokens_mask"


class Defence(Protocol):
    """A way to train; a frozen dataclass of hyperparameters."""

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        """The losses of one batch; differentiate each before asking for the next."""
        ...


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """The classes' (or choices') scores, in float32 whatever the pass ran in."""
    output = model(**{name: value for name, value in batch.items() if name != SPECIAL})
    return cast("Tensor", output.logits).float()


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels)


def divergence(scores: Tensor, others: Tensor) -> Tensor:
    """KL(p ‖ q) of two classifiers' answers, mean over the batch."""
    p, q = scores.log_softmax(-1), others.log_softmax(-1)
    return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)


def symmetric(scores: Tensor, others: Tensor) -> Tensor:
    """KL(p ‖ q) + KL(q ‖ p)."""
    return divergence(scores, others) + divergence(others, scores)


def draw(stream: torch.Generator) -> int:
    """A seed."""
    return int(torch.randint(2**62, (), generator=stream, device=stream.device))


def local(stream: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator on the device where large draws are needed, seeded by `stream`."""
    return torch.Generator(device).manual_seed(draw(stream))


@contextmanager
def dropout_from(seed: int, model: nn.Module) -> Generator[None]:
    """Dropout draws from `seed`; afterwards the process's own generators are restored."""
    device = next(model.parameters()).device
    streams = [torch.default_generator]
    if device.type == "cuda":
        streams.append(cast("Any", torch.cuda).default_generators[device.index or 0])
    states = [stream.get_state() for stream in streams]
    for stream in streams:
        stream.manual_seed(seed)
    try:
        yield
    finally:
        for stream, state in zip(streams, states, strict=True):
            stream.set_state(state)


def answer(model: nn.Module, batch: Batch, seed: int, delta: Tensor | None = None) -> Tensor:
    """The scores with dropout from `seed`, and with `delta` on the embeddings if there is one."""
    with dropout_from(seed, model), nullcontext() if delta is None else perturbed(model, delta):
        return logits(model, batch)


@contextmanager
def perturbed(model: nn.Module, delta: Tensor) -> Generator[None]:
    """`delta` (rows, n, e) is added to the token embeddings: to the encoder's where there are two.

    A hook on the table, because models that are given embeddings instead of tokens may number
    their positions in another way.
    """
    used: list[bool] = []

    def add(_module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        if used:
            return None
        used.append(True)
        return output + delta.to(output.dtype)

    handle = table(model).register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def table(model: nn.Module) -> nn.Module:
    """The token embeddings as the encoder looks them up, where there are two sides.

    An encoder-decoder's own table may be a module that nothing calls: both sides hold its weights.
    """
    whole = cast("Any", model)
    side = whole.get_encoder() if getattr(whole.config, "is_encoder_decoder", False) else whole
    return cast("nn.Module", side.get_input_embeddings())


def unpadded(model: nn.Module, batch: Batch) -> Tensor:
    """Where a perturbation may be, (rows, n, 1): ones at tokens, zeros at padding."""
    if "input_ids" not in batch:
        raise InputError(f"the batch must hold input_ids: it holds {', '.join(batch)}")
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    return mask.flatten(0, -2).unsqueeze(-1).to(cast("Tensor", table(model).weight).dtype)


def noise(model: nn.Module, batch: Batch, stream: torch.Generator, normal: bool) -> Tensor:
    """Standard normal noise, or uniform in [−1, 1], for every token's embedding."""
    free = unpadded(model, batch)
    width = cast("Tensor", table(model).weight).shape[1]
    shape = (*free.shape[:-1], width)
    own = local(stream, free.device)
    if normal:
        return torch.randn(shape, generator=own, device=own.device) * free
    return (torch.rand(shape, generator=own, device=own.device) * 2 - 1) * free


def ascended(delta: Tensor, gradient: Tensor, rate: float, radius: float) -> Tensor:
    """Π_ε(δ + α g/‖g‖_F), text by text: a step of size `rate` up the gradient, inside `radius`."""
    size = gradient.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    return inside(delta.detach() + rate * gradient / size, radius)


def inside(delta: Tensor, radius: float) -> Tensor:
    """Each text's perturbation (rows, n, e), shortened to `radius` where it is longer."""
    size = delta.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    return delta * (radius / size).clamp(max=1)


def spared(batch: Batch) -> Tensor | None:
    """Where special tokens and padding stand, (rows, n), if the batch says so."""
    return batch[SPECIAL].flatten(0, -2).bool() if SPECIAL in batch else None


def positive(**values: float) -> None:
    """Refuse numbers that are negative or not finite, by their names."""
    for name, value in values.items():
        expect_number(name, value, least=0)


@dataclass(frozen=True)
class Plain:
    """Plain fine-tuning, the baseline of every comparison: `min_θ E CE(f_θ(x), y)`."""

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        yield cross_entropy(answer(model, batch, draw(stream)), labels)
