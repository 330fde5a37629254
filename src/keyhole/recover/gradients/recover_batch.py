"""`recover_batch(model, tokenizer, update)`: which tokens, at which places, in which texts.

Tokens come from the first span, texts from the second, classes and last tokens from least squares,
and the judge makes the update again. The reason says what the update does not show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful, environment
from keyhole.core.errors import InputError, expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.data import Example
from keyhole.models.anatomy import anatomy
from keyhole.models.demo import folder_of, open_model
from keyhole.models.loading import Loaded, identity, task_of
from keyhole.recover.attack import Target, solvable
from keyhole.recover.gradients.decoder_texts import DecoderTexts
from keyhole.recover.gradients.encoder_texts import EncoderTexts, Search, contexts_of, places_of
from keyhole.recover.gradients.judge import Errors, judge
from keyhole.recover.gradients.labels import labelled
from keyhole.recover.gradients.span import (
    FirstInputs,
    Span,
    first_inputs,
    inputs_last,
    position_table,
    span_of,
    tokens_in,
)
from keyhole.recover.gradients.update import (
    Batch,
    Protocol,
    Update,
    batch_of,
    load_update,
    task_for,
    update_of,
)
from keyhole.recover.judge import Verdict
from keyhole.recover.recovery import Recovery, TextRecovery

_DIRECTIONS = 24  # of a span's complement, at random: those that an encoder's search looks along
_POSITIONS = 128  # that texts may be long, unless they turn out to be longer
MAX_LENGTH = 512  # tokens of a text that a gradient is made of
METHOD = "GradientSpans"


@dataclass(frozen=True, repr=False)
class BatchRecovery(Recovery):
    """The texts of a batch, in no order, with their classes where the task has any.

    `tokens` are the ids that are in the batch, as far as the update shows them by itself: all of
    them, wherever they stand. `residual` is the difference of the batch's own update from the
    leaked one, `precision` the size of the leak's errors, both relative to the update.
    """

    status: Status
    reason: str
    method: str
    texts: tuple[TextRecovery, ...]
    labels: tuple[int, ...]
    tokens: tuple[int, ...]
    passes: int
    seconds: float
    residual: float | None = None
    precision: float | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "batch recovery"
    ADVICE: ClassVar[Mapping[Status, str]] = {
        Status.RECOVERED: "Treat these gradients as the texts themselves.",
        Status.INEXACT: "Part of the batch is known, as its texts' marks say. "
        "Treat it as given away.",
        Status.UNSOLVED: "Not recovered this time, which is no proof of safety.",
        Status.NOT_IDENTIFIABLE: "More tokens than the model is wide: "
        "the span of their inputs is all there is.",
    }

    @property
    def verified(self) -> int:
        """How many texts are."""
        return sum(text.verified for text in self.texts)

    def summary(self) -> str:
        lines = [f"{self.status} ({self.reason})"]
        lines += [f"  {text.text} ({text.marked})" for text in self.texts]
        return "\n".join([*lines, f"  {self.cost}"])


class _Leaked:
    """An update by the modules of its model: what it shows before any text is put together."""

    def __init__(self, target: Target, update: Update) -> None:
        self.target, self.update = target, update
        self._names = {id(weight): name for name, weight in target.model.named_parameters()}
        self._errors = Errors.of(update, target.model)

    def of(self, weight: Tensor) -> Tensor | None:
        """The gradient of a parameter; None where it was not handed over."""
        return self.update.values.get(self._names.get(id(weight), ""))

    def inputs(self, number: int) -> list[nn.Module]:
        """The maps that block `number` (from 1) applies to its input, each once."""
        attention = self.target.parts.attentions[number - 1]
        return list(dict.fromkeys((attention.query, attention.key, attention.value)))

    def rows(self, maps: Sequence[nn.Module]) -> Tensor:
        """The gradients (outputs, inputs) of maps of the same inputs, one under the other."""
        given = [(map_, self.of(map_.get_parameter("weight"))) for map_ in maps]
        device = self.target.parts.device
        rows = [
            inputs_last(tensor.to(device).double(), map_)
            for map_, tensor in given
            if tensor is not None
        ]
        if not rows:
            raise InputError("this update has no gradient of the first attentions, which are read")
        return torch.cat(rows)

    def span(self, maps: Sequence[nn.Module]) -> Span:
        weights = [(map_, map_.get_parameter("weight")) for map_ in maps]
        variances = [
            inputs_last(self._errors.coarse(self._names[id(weight)]), map_)
            for map_, weight in weights
            if self.of(weight) is not None
        ]
        return span_of(self.rows(maps), torch.cat(variances))

    def used(self, table: nn.Embedding) -> Tensor | None:
        """Which rows (v,) of a table the batch used: those whose gradient is not zero.

        None where that does not show: a table that is tied to the head has a gradient for every
        token, and one with noise as well.
        """
        given = self.of(table.weight)
        if given is None or self.update.protocol.noise:
            return None
        used = (given != 0).any(-1).to(self.target.parts.device)
        return None if bool(used.all()) else used


def recover_batch(
    model: Any, tokenizer: Any, update: Update, *, search: Search | None = None
) -> BatchRecovery:
    """The texts behind an update, verified by making the update again from them."""
    started = time.perf_counter()
    target = Target.of(model, tokenizer)
    _check(target, update)
    try:
        with solvable(model):
            recovery = _recovered(_Leaked(target, update), search or Search())
    except Unsuccessful as end:
        recovery = _no_texts(end.reason, status=end.status)
    seconds = time.perf_counter() - started
    texts = tuple(replace(text, seconds=seconds / len(recovery.texts)) for text in recovery.texts)
    return replace(recovery, texts=texts, seconds=seconds)


def _recovered(leaked: _Leaked, search: Search) -> BatchRecovery:
    target, update = leaked.target, leaked.update
    first, second = (leaked.span(leaked.inputs(number)) for number in (1, 2))
    used = leaked.used(target.parts.tokens)
    # Of few tokens the right ones may still stand out from errors.
    if not first.rank or not second.rank or (used is None and (first.blurred or second.blurred)):
        ranks = f"{first.rank} and {second.rank} dimensions of the first two spans stand out"
        return _no_texts(f"the update's own errors hide what it is made of: {ranks}")
    if not first.says:
        return _too_many(target, first, [] if used is None else used.nonzero()[:, 0].tolist())
    inputs, tokens = _tokens(leaked, first, used)
    if not tokens:
        return _no_texts("no token's input lies in the span of the gradient")
    every = torch.cat(tokens).unique()
    if not second.says:
        return _too_many(target, second, every.tolist())
    texts = _texts(leaked, second, inputs, tokens, every, search)
    if not texts:
        return _no_texts("no text of these tokens fits the gradient", every.tolist())
    batch = labelled(target, update, leaked.of, [ids for ids, _ in texts])
    in_span = [fits and second.sharp for _, fits in texts]
    verdicts = judge(target, update, batch, in_span)
    return _result(target, update, batch, verdicts, sum(in_span), every)


def _check(target: Target, update: Update) -> None:
    if task_for(target.model) != update.task:
        raise InputError(
            f"the update is of a model with a head for {update.task}, "
            f"and {type(target.model).__name__} has none"
        )
    whose = identity(target.model, head=True)
    if update.model is not None and update.model != whose:
        raise InputError(f"the gradients are of the model {update.model}, and this is {whose}")
    shapes = {name: tuple(each.shape) for name, each in target.model.named_parameters()}
    for name, each in update.values.items():
        if shapes.get(name) != tuple(each.shape):
            raise InputError(
                f"expected {name} of shape {shapes.get(name)}, got {tuple(each.shape)}: "
                "is it another model's?"
            )
    if target.parts.layers < 2:
        raise InputError("gradients are read in models of two blocks or more, and this has one")


def _tokens(leaked: _Leaked, span: Span, used: Tensor | None) -> tuple[FirstInputs, list[Tensor]]:
    """Tokens that may stand at each position; tables grow until texts end before they do."""
    parts, known = leaked.target.parts, None
    table = position_table(parts)
    if table is not None:  # its own gradient may show how long the longest text is
        places = leaked.used(table[0])
        known = None if places is None else int(places[table[1] :].sum()) or None
    count = known or _POSITIONS
    while True:
        inputs = first_inputs(parts, count)
        tokens = tokens_in(inputs, span, used)
        ended = len(tokens) < inputs.positions or inputs.positions < count
        if ended or known is not None or inputs.places is None:
            return inputs, tokens
        count *= 2


def _texts(
    leaked: _Leaked,
    span: Span,
    inputs: FirstInputs,
    tokens: list[Tensor],
    every: Tensor,
    search: Search,
) -> list[tuple[list[int], bool]]:
    """Texts, and whether all rows of each lie in the span."""
    target, count = leaked.target, leaked.update.texts
    parts = target.parts
    if parts.causal:
        # Rows of one text are independent: no text is longer than the span has dimensions.
        prefixes = DecoderTexts(target, span, tokens, count, min(span.rank, parts.max_length))
        return [(ids, True) for ids in prefixes][:count]
    values = leaked.rows([parts.attentions[0].value])
    rows = leaked.rows(leaked.inputs(1))
    places = places_of(rows, values, parts.heads, inputs, every, len(tokens))
    directions = leaked.span([parts.attentions[0].output]).some_directions(_DIRECTIONS)
    contexts = contexts_of(parts, inputs, every, len(tokens), directions)
    read = EncoderTexts(target, span, contexts, tokens, places, count, search)
    return [(text.ids, text.fits) for text in read if text.ids]


def _too_many(target: Target, span: Span, ids: list[int]) -> BatchRecovery:
    """The span is all there is; the tokens may show in their table's own gradient."""
    reason = (
        f"the batch has as many tokens as the model is wide ({target.parts.width}), or more: its "
        f"span has {span.rank} dimensions and says nothing"
    )
    if ids:
        reason += f"; {len(ids)} tokens are in it, in an order and in texts that are not known"
    return _no_texts(reason, ids, Status.NOT_IDENTIFIABLE)


def _no_texts(
    reason: str, ids: Sequence[int] = (), status: Status = Status.UNSOLVED
) -> BatchRecovery:
    status = Status.INEXACT if ids else status
    return BatchRecovery(status, reason, METHOD, (), (), tuple(ids), 0, 0.0)


def _result(
    target: Target,
    update: Update,
    batch: Batch,
    verdicts: Sequence[Verdict],
    in_span: int,
    tokens: Tensor,
) -> BatchRecovery:
    verified = sum(verdict.verified for verdict in verdicts)
    residual, precision = verdicts[0].residual, verdicts[0].precision
    reason = (
        f"{len(batch.texts)} of {update.texts} texts, {in_span} in the span; {verified} verified: "
        f"their update differs by {residual:.1e} of its size, the leak's errors are {precision:.1e}"
    )
    status = Status.INEXACT if in_span or verified else Status.UNSOLVED
    status = Status.RECOVERED if verified == update.texts else status
    texts = tuple(
        TextRecovery(
            status=verdict.status, reason=verdict.reason, method=METHOD, ids=list(ids),
            text=target.decode(ids), verified=verdict.verified, passes=0, seconds=0.0,
            marks=verdict.marks, residual=residual, precision=precision, pieces=target.pieces(ids),
        )
        for ids, verdict in zip(batch.texts, verdicts, strict=True)
    )  # fmt: skip
    everything = tuple(sorted({*tokens.tolist(), *(id_ for ids in batch.texts for id_ in ids)}))
    passes = 1 + sum(verdict.forwards for verdict in verdicts)
    return BatchRecovery(
        status, reason, METHOD, texts, batch.labels, everything, passes, 0.0, residual, precision
    )


def capture_update(
    model: str | Loaded,
    examples: Sequence[Example],
    *,
    out: str | Path,
    protocol: Protocol | None = None,
    hide: Sequence[str] = (),
    precision: str = "float32",
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
) -> Update:
    """Write down what a client would hand over for one batch of texts.

    `model` is what the command line takes, or one that is loaded with its head. Texts without a
    class get the one that the model itself gives. `hide` leaves out the gradients of `embeddings`.
    """
    expect_seed(seed)
    loaded = opened(model, device, allow_pickle)
    max_length = min(MAX_LENGTH, anatomy(loaded.model).max_length)
    batch = batch_of(loaded.model, loaded.tokenizer, examples, max_length)
    update = update_of(loaded.model, batch, protocol, hide=hide, precision=precision, seed=seed)
    update.save(out)
    return update


def recovering_updates(
    model: str | Loaded,
    files: Sequence[str | Path],
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
    track: Track = untracked,
) -> Iterator[tuple[Path, BatchRecovery]]:
    """The batch behind each file of gradients, one by one."""
    loaded = opened(model, device, allow_pickle)
    overall = track("recover", len(files))
    for number, file in enumerate(files, 1):
        update = load_update(file)
        yield Path(file), recover_batch(loaded.model, loaded.tokenizer, update)
        overall(number, note=Path(file).name)


def opened(model: str | Loaded, device: str, allow_pickle: bool) -> Loaded:
    """The model with the head that its loss is taken of."""
    if not isinstance(model, str):
        return model
    task = task_of(folder_of(model))
    return open_model(model, task=task, device=device, allow_pickle=allow_pickle)
