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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.capture import hooks
from keyhole.models.next_token import unembedding
from keyhole.recover.attack import Target
from keyhole.recover.gradients.update import Batch, Update

Texts = Sequence[Sequence[int]]


def labels_of(target: Target, update: Update, names: dict[int, str], texts: Texts) -> list[int]:
    """The class of each text."""
    head = _head(target.model)
    inputs, _ = _inputs(target, head, texts)
    given = update.values.get(names[id(head.weight)])
    if given is None:
        raise InputError("expected the gradient of the head, which classes show in, got none")
    # A causal model's head is applied at every position, and answers at the last one.
    deltas = _deltas(
        torch.stack([each[-1] if each.ndim > 1 else each for each in inputs]), given, head
    )
    return (_sign(update) * deltas).argmin(-1).tolist()


def last_tokens(target: Target, update: Update, names: dict[int, str], texts: Texts) -> list[int]:
    """The token after each text: the one that its last position was to predict."""
    map_ = _last_map(target)
    given = update.values.get(names[id(map_.weight)])
    norm = target.parts.closing_norm(target.parts.layers)
    if given is None or norm is None:
        raise InputError("expected the gradient of the last block, got none")
    inputs, states = _inputs(target, map_, texts, before=norm)
    deltas = _sign(update) * _deltas(torch.cat(inputs), given, map_)
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    head = unembedding(target.model)
    tokens: list[int] = []
    for end, rows in zip(ends.tolist(), states, strict=True):
        state = rows[-1].detach()
        jacobian = torch.autograd.functional.jacobian(norm, state).double()
        with torch.no_grad():
            likely = head(norm(state)).double().softmax(-1)
        table = head.weight.detach().double()
        wanted = (likely @ table - table) @ jacobian
        alike = torch.nn.functional.cosine_similarity(wanted, deltas[end][None])
        tokens.append(int(alike.argmax()))
    return tokens


def _inputs(
    target: Target, map_: nn.Module, texts: Texts, before: nn.Module | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """What a map (and, if asked for, a later module) receives for each text, in float64."""
    taken: list[Tensor] = []
    states: list[Tensor] = []

    def take(_m: nn.Module, args: tuple[Any, ...]) -> None:
        taken.append(args[0][0])

    def take_state(_m: nn.Module, args: tuple[Any, ...]) -> None:
        states.append(args[0][0])

    wanted = [(map_.register_forward_pre_hook, take)]
    if before is not None:
        wanted.append((before.register_forward_pre_hook, take_state))
    with torch.no_grad(), hooks(*wanted):
        for text in texts:
            target.model(input_ids=torch.tensor([list(text)], device=target.parts.device))
    return taken, states


def _sign(update: Update) -> float:
    """Weights move against the gradient."""
    return -1.0 if update.protocol.steps > 1 else 1.0


def _deltas(inputs: Tensor, given: Tensor, map_: nn.Module) -> Tensor:
    """The δ (rows, outputs) behind a gradient, by least squares."""
    inputs = inputs.double()
    given = given.to(inputs.device).double()
    rows = given.mT if isinstance(map_, nn.Linear) else given
    return torch.linalg.pinv(inputs.mT, rtol=1e-9) @ rows


def _head(model: Any) -> nn.Linear:
    """The map that gives a classifier's answers."""
    classes = int(model.config.num_labels)
    maps = [module for module in model.modules() if isinstance(module, nn.Linear)]
    fitting = [map_ for map_ in maps if map_.out_features == classes]
    if not fitting:
        raise InputError(f"expected a classifier of {classes} classes, got none")
    return fitting[-1]


def _last_map(target: Target) -> Any:
    """The linear map of the last block that is applied last."""
    called: list[nn.Module] = []
    block = target.parts.blocks[-1]
    # GPT-2 calls its linear maps Conv1D.
    maps = [each for each in block.modules() if type(each).__name__ in ("Linear", "Conv1D")]

    def note(module: nn.Module, _args: Any) -> None:
        called.append(module)

    with torch.no_grad(), hooks(*((map_.register_forward_pre_hook, note) for map_ in maps)):
        target.model(input_ids=torch.tensor([[0, 0]], device=target.parts.device))
    return called[-1]


def labelled(target: Target, update: Update, names: dict[int, str], texts: Texts) -> Batch:
    """The whole batch: texts with their classes, or with their last tokens."""
    if update.task == "classification":
        classes = labels_of(target, update, names, texts)
        return Batch(tuple(map(tuple, texts)), tuple(classes))
    ends = last_tokens(target, update, names, texts)
    return Batch(tuple((*text, end) for text, end in zip(texts, ends, strict=True)))
