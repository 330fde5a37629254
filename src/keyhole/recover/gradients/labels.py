"""What a batch's loss was taken of, once its texts are known: classes, or each text's last token.

The loss does not show in what the layers receive, but in the gradients δ of what a linear map
gives: with its inputs a_i known from the texts, G = Σ_i δ_i a_iᵀ is solved for the δ_i by least
squares.

- Classes: the head's own δ is p − e_y, scaled. Its only negative number is at the class y.
- The last token of a causal model's text is predicted and never read, so no span holds it. The last
  map of the last block has δ = Jᵀ Wᵀ (p − e_y), scaled, with W the unembedding and J the Jacobian
  of the final norm: all tokens y are compared by direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.capture import hooks
from keyhole.models.next_token import unembedding
from keyhole.recover.attack import Target
from keyhole.recover.gradients.span import inputs_last
from keyhole.recover.gradients.update import Batch, Update

Texts = Sequence[Sequence[int]]
Given = Callable[[Tensor], Tensor | None]


def labelled(target: Target, update: Update, given: Given, texts: Texts) -> Batch:
    """The whole batch: texts with their classes, or with their last tokens.

    `given` is the gradient of a parameter, None where it was not handed over.
    """
    sign = -1.0 if update.protocol.steps > 1 else 1.0  # weights move against the gradient
    if update.task == "classification":
        return Batch(tuple(map(tuple, texts)), tuple(_classes(target, given, texts, sign)))
    ends = _last_tokens(target, given, texts, sign)
    return Batch(tuple((*text, end) for text, end in zip(texts, ends, strict=True)))


def _classes(target: Target, given: Given, texts: Texts, sign: float) -> list[int]:
    head = _head(target.model)
    leaked = given(head.weight)
    if leaked is None:
        raise InputError("this update has no gradient of the head, which classes show in")
    # A causal model's head is applied at every position, and answers at the last one.
    inputs = [each[-1] if each.ndim > 1 else each for each in _inputs(target, head, texts)]
    return (sign * _deltas(torch.stack(inputs), leaked, head)).argmin(-1).tolist()


def _last_tokens(target: Target, given: Given, texts: Texts, sign: float) -> list[int]:
    """The token after each text: the one that its last position was to predict."""
    linear = _last_map(target)
    leaked = given(linear.weight)
    norm = target.parts.closing_norm(target.parts.layers)
    if leaked is None or norm is None:
        raise InputError("this update has no gradient of the last block, where last tokens show")
    deltas = sign * _deltas(torch.cat(_inputs(target, linear, texts)), leaked, linear)
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    head = unembedding(target.model)
    table = head.weight.detach().double()
    tokens: list[int] = []
    for end, rows in zip(ends.tolist(), _inputs(target, norm, texts), strict=True):
        state = rows[-1].detach()
        jacobian = torch.autograd.functional.jacobian(norm, state).double()
        with torch.no_grad():
            likely = head(norm(state)).double().softmax(-1)
        wanted = (likely @ table - table) @ jacobian
        tokens.append(int(torch.cosine_similarity(wanted, deltas[end][None]).argmax()))
    return tokens


def _inputs(target: Target, module: nn.Module, texts: Texts) -> list[Tensor]:
    """What a module receives for each text."""
    taken: list[Tensor] = []

    def take(_module: nn.Module, args: tuple[Any, ...]) -> None:
        taken.append(args[0][0])

    with torch.no_grad(), hooks((module.register_forward_pre_hook, take)):
        for text in texts:
            target.model(input_ids=torch.tensor([list(text)], device=target.parts.device))
    return taken


def _deltas(inputs: Tensor, leaked: Tensor, linear: nn.Module) -> Tensor:
    """The δ (rows, outputs) behind a gradient, by least squares."""
    inputs = inputs.double()
    rows = inputs_last(leaked.to(inputs.device).double(), linear).mT
    return torch.linalg.pinv(inputs.mT, rtol=1e-9) @ rows


def _head(model: Any) -> nn.Linear:
    """The map that gives a classifier's answers."""
    classes = int(model.config.num_labels)
    maps = [module for module in model.modules() if isinstance(module, nn.Linear)]
    fitting = [linear for linear in maps if linear.out_features == classes]
    if not fitting:
        raise InputError(f"this model has no linear head of {classes} classes")
    return fitting[-1]


def _last_map(target: Target) -> Any:
    """The linear map of the last block that is applied last."""
    called: list[nn.Module] = []
    block = target.parts.blocks[-1]
    # GPT-2 calls its linear maps Conv1D.
    maps = [each for each in block.modules() if type(each).__name__ in ("Linear", "Conv1D")]

    def note(module: nn.Module, _args: Any) -> None:
        called.append(module)

    with torch.no_grad(), hooks(*((linear.register_forward_pre_hook, note) for linear in maps)):
        target.model(input_ids=torch.tensor([[0, 0]], device=target.parts.device))
    return called[-1]
