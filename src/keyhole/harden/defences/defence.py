"""The interface of training defences, and the parts that they share.

A defence yields the losses of one batch, one after the other. The caller differentiates
each loss before it asks for the next:

    for loss in defence.losses(model, batch, labels, stream):
        loss.backward()

FreeLB yields a loss for each step of its ascent. Its next step uses the gradient that
this backward pass leaves at the perturbation, so K steps cost K passes instead of 2K.
ASA and AttackMasks yield the clean loss and the other one separately, so that only one
graph is in memory at a time.

`batch` holds the model's inputs, (b, n) or (b, choices, n), and may hold
`special_tokens_mask`, which is not passed to the model. All randomness comes from
`stream`, also that of dropout. Passes that are compared use the same dropout; otherwise
a perturbation of radius zero would change answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import InputError, expect_number
from keyhole.models.hooks import hooks

Batch = Mapping[str, Tensor]
SPECIAL = "special_tokens_mask"


class Defence(Protocol):
    """A way to train, as a frozen dataclass of hyperparameters."""

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        """Yield the losses of one batch; differentiate each before asking for the next."""
        ...


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the scores of the classes (or choices) in float32."""
    output = model(**{name: value for name, value in batch.items() if name != SPECIAL})
    return cast("Tensor", output.logits).float()


def divergence(scores: Tensor, others: Tensor) -> Tensor:
    """KL(p ‖ q) of the answers p and q, averaged over the batch."""
    p = scores.log_softmax(-1)
    q = others.log_softmax(-1)
    return nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)


def symmetric(scores: Tensor, others: Tensor) -> Tensor:
    """KL(p ‖ q) + KL(q ‖ p)."""
    return divergence(scores, others) + divergence(others, scores)


def draw(stream: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=stream, device=stream.device))


def local(stream: torch.Generator, device: torch.device) -> torch.Generator:
    """Make a generator for large draws on a device, seeded by `stream`."""
    return torch.Generator(device).manual_seed(draw(stream))


@contextmanager
def dropout_from(seed: int, model: nn.Module) -> Generator[None]:
    """Seed the generators that dropout draws from, and restore their states afterwards."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def passes(
    model: nn.Module,
    batch: Batch,
    stream: torch.Generator,
) -> Callable[..., Tensor]:
    """Return a function that gives the scores of a batch, always with the same dropout.

    It may be given a tensor, which is added to the embeddings.
    """
    return partial(answer, model, batch, draw(stream))


def answer(
    model: nn.Module,
    batch: Batch,
    seed: int,
    delta: Tensor | None = None,
) -> Tensor:
    """Return the scores with dropout from `seed`, and with `delta` added to the embeddings."""
    change = nullcontext() if delta is None else perturbed(model, delta)
    with dropout_from(seed, model), change:
        return logits(model, batch)


@contextmanager
def perturbed(model: nn.Module, delta: Tensor) -> Generator[None]:
    """Add `delta` (rows, n, e) to the token embeddings (of the encoder, if there is a decoder too).

    A hook on the table is used, because models that get embeddings instead of tokens
    may number positions differently.
    """
    used: list[bool] = []

    def add(
        _module: nn.Module,
        _args: Any,
        output: Tensor,
    ) -> Tensor | None:
        if used:
            return None
        used.append(True)
        return output + delta.to(output.dtype)

    with hooks((table(model).register_forward_hook, add)):
        yield


def table(model: nn.Module) -> nn.Module:
    """Return the table of token embeddings that the model (or its encoder) uses.

    An encoder-decoder's own table may be a module that is never called, because both
    sides have a module with its weights.
    """
    whole = cast("Any", model)
    if getattr(whole.config, "is_encoder_decoder", False):
        side = whole.get_encoder()
    else:
        side = whole
    return cast("nn.Module", side.get_input_embeddings())


def vectors(model: nn.Module) -> Tensor:
    """Return the weights of the table of token embeddings, (vocabulary, e)."""
    return cast("Tensor", table(model).weight)


def unpadded(model: nn.Module, batch: Batch) -> Tensor:
    """Return 1 for tokens and 0 for padding, (rows, n, 1)."""
    if "input_ids" not in batch:
        raise InputError(f"the batch must hold input_ids: it holds {', '.join(batch)}")
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    return mask.flatten(0, -2).unsqueeze(-1).to(vectors(model).dtype)


def noise(
    model: nn.Module,
    batch: Batch,
    stream: torch.Generator,
    normal: bool,
) -> Tensor:
    """Draw noise for every token's embedding: standard normal, or uniform in [−1, 1]."""
    free = unpadded(model, batch)
    shape = (*free.shape[:-1], vectors(model).shape[1])
    own = local(stream, free.device)
    if normal:
        return torch.randn(shape, generator=own, device=own.device) * free
    return (torch.rand(shape, generator=own, device=own.device) * 2 - 1) * free


def climbed(
    delta: Tensor,
    gradient: Tensor,
    rate: float,
) -> Tensor:
    """Take a step up the gradient of each matrix: δ + η g/‖g‖_∞, η = `rate`."""
    size = gradient.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    return delta.detach() + rate * gradient / size


def ascended(
    delta: Tensor,
    gradient: Tensor,
    rate: float,
    radius: float,
) -> Tensor:
    """Take a step up the gradient for each text: Π_ε(δ + α g/‖g‖_F), α = `rate`, ε = `radius`."""
    size = gradient.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    return inside(delta.detach() + rate * gradient / size, radius)


def inside(delta: Tensor, radius: float) -> Tensor:
    """Project each text's perturbation (rows, n, e) into the ball of `radius`."""
    size = delta.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    return delta * (radius / size).clamp(max=1)


def spared(batch: Batch) -> Tensor | None:
    """Return where special tokens and padding are, (rows, n), if the batch says so."""
    return batch[SPECIAL].flatten(0, -2).bool() if SPECIAL in batch else None


def expect_nonnegative(method: object) -> None:
    """Raise if a hyperparameter is negative or not finite."""
    for name, value in vars(method).items():
        expect_number(name, value, least=0)


@dataclass(frozen=True)
class Plain:
    """Plain fine-tuning, the baseline: `min_θ E CE(f_θ(x), y)`."""

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        yield cross_entropy(passes(model, batch, stream)(), labels)
