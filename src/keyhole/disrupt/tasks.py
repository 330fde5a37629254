"""The question that an attack asks a model, in the same form for every task.

Every task is reduced to logits (b, m, classes) and labels (b, m). m is 1 for a
classifier, for multiple choice (where the classes are the choices) and for the next
token; for a continuation it is the number of tokens.

- **Causal LM.** Without labels, the label is the model's own greedy continuation of m tokens. It is
  appended to the text, and all m predictions are read in one pass. The greedy
  continuation changes under a mask exactly when one of these predictions changes:
  before the first change, the decoder would have seen the same tokens.
- **Sequence to sequence.** The same, on the side of the decoder. If `decoder_input_ids` are given,
  all their positions are predicted.
- An untargeted attack flips an answer if any of the m predictions changes. A targeted attack flips
  it if all of them are the target's.

An attack pushes the margin below zero. The margin is the label's logit minus the best
other, the least of the m; with a target it is the best other minus the target's, the
largest of the m.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_count
from keyhole.data import NO_LABEL, Batch
from keyhole.models.anatomy import expect_numbers, positions
from keyhole.models.loading import Task, head_of

IGNORED = -100  # the label of a position where nothing is predicted
_BELOW = -1e30
_MAX_TOKENS = 100_000  # of a continuation, for models without a limit
SPECIAL = "special_tokens_mask"


@dataclass(frozen=True, eq=False)
class Question:
    """Inputs, the right answers (`labels`), and the wanted answers (`target`, None for any other).

    `special` marks the special tokens, if the tokenizer did.
    """

    task: Task
    inputs: Batch
    labels: Tensor
    target: Tensor | None
    special: Tensor | None

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> int:
        """The number of sequences of one example: its choices, or 1."""
        return self.inputs["input_ids"].shape[1] if self.task == "choice" else 1

    @property
    def wanted(self) -> Tensor:
        """The answers that the margin is about: the target's, or the labels."""
        return self.labels if self.target is None else self.target

    def part(self, indices: Tensor) -> Question:
        return replace(
            self,
            inputs={name: value[indices] for name, value in self.inputs.items()},
            labels=self.labels[indices],
            target=None if self.target is None else self.target[indices],
            special=None if self.special is None else self.special[indices],
        )

    def logits(self, model: Any) -> Tensor:
        """The model's logits (b, m, classes), in float32 or float64.

        NaN is no answer, though its argmax is class 0: raises InputError, also under a
        mask.
        """
        if self.task == "causal":
            logits = self._last(model)
        else:
            options = _options(model, {"use_cache": False})
            logits = model(**self.inputs, **options).logits
            logits = logits if logits.ndim == 3 else logits.unsqueeze(1)
        ignored = (self.labels == IGNORED).unsqueeze(-1)
        expect_numbers(model, [logits.masked_fill(ignored, 0)])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _last(self, model: Any) -> Tensor:
        """The logits at the last m real tokens, with padding on either side."""
        m = self.labels.shape[1]
        positions = last_real(self.inputs).unsqueeze(1) + torch.arange(
            1 - m, 1, device=self.labels.device
        )
        wanted, place = positions.unique(return_inverse=True)
        # The vocabulary is large, so logits are computed only where they are needed.
        options = _options(model, {"use_cache": False, "logits_to_keep": wanted})
        logits = model(**self.inputs, **options).logits
        index = place if "logits_to_keep" in options else positions
        return logits.gather(1, index.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))

    def margin(self, logits: Tensor, aim: int = 0) -> Tensor:
        """The margin (b,), positive if the answer is not flipped.

        Without a target it is against the other class of rank `aim`; rank 0 is the
        best.
        """
        index = self.wanted.clamp(min=0).unsqueeze(-1)
        ignored = self.wanted == IGNORED
        chosen = logits.gather(-1, index).squeeze(-1)
        others = logits.scatter(-1, index, _BELOW)
        if self.target is not None:
            return (others.amax(-1) - chosen).masked_fill(ignored, _BELOW).amax(-1)
        # Ranks beyond the last class start again from 0.
        rank = aim % max(1, logits.shape[-1] - 1)
        other = others.topk(rank + 1, -1).values[..., rank]
        return (chosen - other).masked_fill(ignored, -_BELOW).amin(-1)

    def surprise(self, logits: Tensor) -> Tensor:
        """The loss that an attack raises: the labels' cross-entropy, or minus the target's."""
        sign = -1 if self.target is None else 1
        return sign * self._log_probability(logits, self.wanted)

    def confidence(self, logits: Tensor) -> Tensor:
        """The joint probability of the m labels."""
        return self._log_probability(logits, self.labels).exp()

    @staticmethod
    def _log_probability(logits: Tensor, answers: Tensor) -> Tensor:
        index = answers.clamp(min=0).unsqueeze(-1)
        each = logits.log_softmax(-1).gather(-1, index).squeeze(-1)
        return each.masked_fill(answers == IGNORED, 0).sum(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1).masked_fill(self.labels == IGNORED, IGNORED)

    def right(self, logits: Tensor) -> Tensor:
        return (self.predicted(logits) == self.labels).all(-1)

    def flipped(self, logits: Tensor) -> Tensor:
        predicted = self.predicted(logits)
        if self.target is None:
            return (predicted != self.labels).any(-1)
        return (predicted == self.target).all(-1)


def ask(
    model: Any,
    batch: Batch,
    labels: Tensor | None,
    *,
    target: Tensor | int | None = None,
    continuation: int = 1,
) -> Question:
    """Return the question that `batch` asks `model`. A language model needs no labels."""
    task = _task(model, batch)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    special = inputs.pop(SPECIAL, None)
    inputs.pop("labels", None)
    if task in ("classification", "choice"):
        if labels is None:
            raise InputError("a classifier needs labels")
    else:
        inputs, special, own = _continued(
            model, task, inputs, special, labels, continuation
        )
        labels = own if labels is None else labels
    labels = _shaped(labels, len(next(iter(inputs.values()))), device, "labels")
    wanted = None if target is None else _target(target, labels)
    return Question(task, inputs, labels, wanted, special)


def _task(model: Any, batch: Batch) -> Task:
    ids = batch.get("input_ids")
    several = ids is not None and ids.ndim == 3
    task = "choice" if several else head_of(model)
    if task == "base" or (task == "choice") != several:
        raise InputError(
            f"{type(model).__name__} has no head for classes, multiple choice, causal or "
            "sequence-to-sequence text"
        )
    return task


def _shaped(
    labels: Tensor,
    size: int,
    device: torch.device,
    what: str,
) -> Tensor:
    labels = labels.to(device).long()
    labels = labels.unsqueeze(-1) if labels.ndim == 1 else labels
    if labels.ndim != 2 or len(labels) != size:
        raise InputError(f"expected {size} {what}, got shape {tuple(labels.shape)}")
    return labels


def _target(target: Tensor | int, labels: Tensor) -> Tensor:
    if isinstance(target, int):
        return torch.full_like(labels, target).masked_fill(labels == IGNORED, IGNORED)
    shaped = _shaped(target, len(labels), labels.device, "targets")
    if shaped.shape != labels.shape:
        raise InputError(
            f"expected targets of shape {tuple(labels.shape)}, got {shaped.shape}"
        )
    return shaped


def _options(model: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in wanted.items() if name in known}


def last_real(inputs: Batch) -> Tensor:
    """Return the position of the last token that is not padding."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)
    return (positions * mask).amax(-1)


def _continued(
    model: Any,
    task: Task,
    inputs: Batch,
    special: Tensor | None,
    labels: Tensor | None,
    count: int,
) -> tuple[Batch, Tensor | None, Tensor]:
    """Append the first m−1 tokens of the answer to the inputs, and return both.

    The answer is the labels, or the model's greedy continuation.
    """
    ids = inputs["input_ids"]
    most = positions(model)
    length = ids.shape[-1]
    if task == "causal" and most is not None and length + count - 1 > most:
        raise InputError(
            f"the model has {most:,} positions, too few for {length:,} tokens and a continuation "
            f"of {count:,}: try a smaller --max-length"
        )
    expect_count("the tokens of a continuation", count, most=_MAX_TOKENS)
    if "decoder_input_ids" in inputs:
        return inputs, special, _forced(model, inputs)
    inputs = _positioned(model, inputs) if task == "causal" else _started(model, inputs)
    answer: list[Tensor] = []
    if labels is not None:
        given = _shaped(labels, len(ids), ids.device, "labels")
        answer = list(given.unbind(1))
        count = len(answer)
    for step in range(count):
        if labels is None:
            question = Question(task, inputs, ids[:, :1], None, None)
            with torch.no_grad():
                answer.append(question.logits(model)[:, -1].argmax(-1))
        if step + 1 == count:
            break
        if task == "causal":
            inputs = _appended(inputs, answer[step])
            special = None if special is None else nn.functional.pad(special, (0, 1))
        else:
            decoded = [inputs["decoder_input_ids"], answer[step].unsqueeze(1)]
            inputs = {**inputs, "decoder_input_ids": torch.cat(decoded, 1)}
    return inputs, special, torch.stack(answer, 1)


def _positioned(model: Any, inputs: Batch) -> Batch:
    """Add position ids to left-padded inputs, which the model would number from the padding."""
    mask = inputs.get("attention_mask")
    if mask is None or "position_ids" in inputs or mask[:, 0].all():
        return inputs
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {**inputs, **_options(model, {"position_ids": places})}


def _appended(inputs: Batch, tokens: Tensor) -> Batch:
    """Add a token after the last real token of each text."""
    after = last_real(inputs).unsqueeze(1) + 1
    grown: Batch = {}
    for name, value in inputs.items():
        last = value[:, -1:]
        longer = torch.cat([value, last], 1)
        match name:
            case "input_ids":
                new = tokens.unsqueeze(1)
            case "attention_mask":
                longer[:, -1] = 0
                new = torch.ones_like(last)
            case "position_ids":
                new = value.gather(1, after - 1) + 1
            case _:
                new = last
        grown[name] = longer.scatter(1, after, new)
    if "attention_mask" not in grown:
        grown["attention_mask"] = torch.ones_like(grown["input_ids"])
    return grown


def _started(model: Any, inputs: Batch) -> Batch:
    """Add the token with which the decoder starts."""
    config = model.config
    ids = inputs["input_ids"]
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    starts = (getattr(config, name) for name in names)
    start = next(token for token in starts if token is not None)
    return {**inputs, "decoder_input_ids": ids.new_full((len(ids), 1), start)}


def _forced(model: Any, inputs: Batch) -> Tensor:
    """Return the model's predictions at all given decoder tokens."""
    with torch.no_grad():
        own = model(**inputs).logits.argmax(-1)
    mask = inputs.get("decoder_attention_mask")
    return own if mask is None else own.masked_fill(mask == 0, IGNORED)


def answers(model: Any, batch: Batch) -> Tensor:
    """Return the logits that a model gives a batch; NaN is no answer: raises InputError."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    inputs.pop(SPECIAL, None)
    with torch.no_grad():
        logits = model(**inputs).logits
    expect_numbers(model, [logits])
    return logits


def settled(
    model: Any,
    batch: Batch,
    labels: Tensor,
    target: int | None = None,
) -> Tensor:
    """Return the labels of a batch for a classifier, with the model's answer where there is none.

    For an example without a label the attack shows whether the answer can be changed,
    not whether a right answer can be made wrong.
    """
    logits = answers(model, batch)
    classes = logits.shape[-1]
    for what, number in (("labels", int(labels.max())), ("the target", target)):
        if number is not None and not NO_LABEL <= number < classes:
            raise InputError(
                f"{what} must be from 0 to {classes - 1} for this model, got {number}"
            )
    return torch.where(labels == NO_LABEL, logits.argmax(-1).to(labels.device), labels)
