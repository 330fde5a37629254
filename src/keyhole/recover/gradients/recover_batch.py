"""`recover_batch(model, tokenizer, update)`: which tokens, at which places, in which texts.

Tokens come from the first span, texts from the second, classes and last tokens from least squares,
and the judge makes the update again. What the update does not show is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful, environment
from keyhole.core.errors import InputError, expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.core.result import Result, restored
from keyhole.data import Example
from keyhole.models.anatomy import anatomy
from keyhole.models.demo import folder_of, open_model
from keyhole.models.loading import Loaded, identity, task_of
from keyhole.recover.attack import Target
from keyhole.recover.gradients.decoder_texts import DecoderTexts
from keyhole.recover.gradients.encoder_texts import EncoderTexts, Search, contexts_of, places_of
from keyhole.recover.gradients.judge import Errors, Fit, judge
from keyhole.recover.gradients.labels import labelled
from keyhole.recover.gradients.span import (
    FirstInputs,
    Span,
    all_tokens,
    first_inputs,
    inputs_last,
    map_rows,
    position_table,
    span_of,
    tokens_in,
    used_rows,
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
from keyhole.recover.recovery import Mark, TextRecovery
from keyhole.recover.solvable import solvable

_DIRECTIONS = 24  # of a span's complement, at random: those that an encoder's search looks along
_POSITIONS = 128  # that texts may be long, unless they turn out to be longer
METHOD = "GradientSpans"


@dataclass(eq=False)
class _Knowledge:
    """What the update shows before any text is put together."""

    target: Target
    update: Update
    names: dict[int, str]
    errors: Errors

    def maps(self, number: int) -> list[nn.Module]:
        """The maps that block `number` (from 1) applies to its input, each once."""
        attention = self.target.parts.attentions[number - 1]
        return list(dict.fromkeys((attention.query, attention.key, attention.value)))

    def rows(self, maps: Sequence[nn.Module]) -> Tensor:
        """The gradients of maps of the same inputs, one under the other, in float64."""
        parts = [map_rows(self.update, self.names, map_) for map_ in maps]
        given = [rows for rows in parts if rows is not None]
        if not given:
            raise InputError("expected the gradient of the first attentions, got none of them")
        return torch.cat(given)

    def span(self, maps: Sequence[nn.Module]) -> Span:
        """The span of the maps' inputs."""
        named = [(self.names[id(map_.get_parameter("weight"))], map_) for map_ in maps]
        variances = [
            inputs_last(self.errors.coarse(name), map_)
            for name, map_ in named
            if name in self.update.values
        ]
        return span_of(self.rows(maps), torch.cat(variances))

    def used(self) -> Tensor | None:
        """Tokens (v,) with a row of their own in the gradient; None where that does not show.

        A table that is tied to the head has a row for every token; one with noise as well.
        """
        given = self.update.values.get(self.names.get(id(self.target.parts.tokens.weight), ""))
        if given is None or self.update.protocol.noise:
            return None
        used = used_rows(given).to(self.target.parts.device)
        return None if bool(used.all()) else used

    def positions(self) -> int | None:
        """How long the longest text is, where the positions' own gradient shows it."""
        known = position_table(self.target.parts)
        if known is None or self.update.protocol.noise:
            return None
        table, first = known
        given = self.update.values.get(self.names.get(id(table.weight), ""))
        return None if given is None else int(used_rows(given)[first:].sum()) or None


def recover_batch(
    model: Any, tokenizer: Any, update: Update, *, search: Search | None = None
) -> BatchRecovery:
    """The texts behind an update, verified by making the update again from them."""
    started = time.perf_counter()
    target = Target.of(model, tokenizer)
    _check(target, update)
    try:
        with solvable(model):
            return _recovered(target, update, search or Search(), started)
    except Unsuccessful as end:
        return replace(_nothing(end.reason, started), status=end.status)


def _recovered(target: Target, update: Update, search: Search, started: float) -> BatchRecovery:
    model = target.model
    names = {id(each): name for name, each in model.named_parameters()}
    known = _Knowledge(target, update, names, Errors.of(update, model))
    first, second = known.span(known.maps(1)), known.span(known.maps(2))
    used = known.used()
    if not first.rank or not second.rank or (used is None and (first.blurred or second.blurred)):
        return _blurred(first, second, started)  # of few tokens the right ones may still stand out
    if not first.says:
        return _too_many(target, first, used, started)
    inputs, tokens = _tokens(target, first, used, known.positions())
    if not tokens:
        return _nothing("no token's input lies in the span of the gradient", started)
    if not second.says:
        return _too_many(target, second, _flags(target, tokens), started)
    texts = _texts(known, second, inputs, tokens, search)
    if not texts:
        return _nothing("no text of these tokens fits the gradient", started, tokens)
    batch = labelled(target, update, names, [ids for ids, _ in texts])
    fit = judge(target, update, batch)
    fits = [fits and second.sharp for _, fits in texts]
    return _result(target, update, batch, fit, fits, all_tokens(tokens), started)


def _check(target: Target, update: Update) -> None:
    if task_for(target.model) != update.task:
        raise InputError(
            f"expected a model with a head for {update.task}, got {type(target.model).__name__}"
        )
    whose = identity(target.model, head=True)
    if update.model is not None and update.model != whose:
        raise InputError(f"expected gradients of the model {whose}, got those of {update.model}")
    shapes = {name: tuple(each.shape) for name, each in target.model.named_parameters()}
    for name, each in update.values.items():
        if shapes.get(name) != tuple(each.shape):
            raise InputError(
                f"expected {name} of shape {shapes.get(name)}, got {tuple(each.shape)}: "
                "is it another model's?"
            )
    if target.parts.layers < 2:
        raise InputError("expected a model of two blocks or more, got one")


def _tokens(
    target: Target, span: Span, used: Tensor | None, positions: int | None
) -> tuple[FirstInputs, list[Tensor]]:
    """Tokens that may stand at each position; tables grow until texts end before they do."""
    count = positions or _POSITIONS
    while True:
        inputs = first_inputs(target.parts, count)
        tokens = tokens_in(inputs, span, used)
        ended = len(tokens) < inputs.positions or inputs.positions < count
        if ended or positions is not None or inputs.places is None:
            return inputs, tokens
        count *= 2


def _texts(
    known: _Knowledge, span: Span, inputs: FirstInputs, tokens: list[Tensor], search: Search
) -> list[tuple[list[int], bool]]:
    """Texts, and whether all rows of each lie in the span."""
    target, count = known.target, known.update.texts
    if target.parts.causal:
        # Rows of one text are independent: no text is longer than the span has dimensions.
        longest = min(span.rank, target.parts.longest)
        prefixes = DecoderTexts(target, span, tokens, count, longest)
        return [(ids, True) for ids in prefixes][:count]
    together = all_tokens(tokens)
    values = known.rows([target.parts.attentions[0].value])
    places = places_of(
        known.rows(known.maps(1)), values, target.parts.heads, inputs, together, len(tokens)
    )
    outer = known.span([target.parts.attentions[0].output])
    contexts = contexts_of(
        target.parts, inputs, together, len(tokens), outer.some_directions(_DIRECTIONS)
    )
    read = EncoderTexts(target, span, contexts, tokens, places, count, search)
    return [(text.ids, text.fits) for text in read if text.ids]


def _flags(target: Target, tokens: Sequence[Tensor]) -> Tensor:
    flags = torch.zeros(target.vocabulary, dtype=torch.bool, device=target.parts.device)
    flags[all_tokens(tokens)] = True
    return flags


def _too_many(target: Target, span: Span, used: Tensor | None, started: float) -> BatchRecovery:
    """The span is all there is; the tokens may show in their table's own gradient."""
    width = target.parts.width
    reason = f"the batch has as many tokens as the model is wide ({width}), or more: its span "
    reason += f"has {span.rank} dimensions and says nothing"
    ids: list[int] = []
    if used is not None:
        ids = used.nonzero()[:, 0].tolist()
        reason += f"; {len(ids)} tokens are in it, in an order and in texts that are not known"
    status = Status.INEXACT if ids else Status.NOT_IDENTIFIABLE
    return BatchRecovery(
        status, reason, METHOD, (), (), tuple(ids), 0, time.perf_counter() - started
    )


def _blurred(first: Span, second: Span, started: float) -> BatchRecovery:
    """Rounding or noise leaves too little of a span."""
    ranks = f"{first.rank} and {second.rank} dimensions of the first two spans stand out"
    return _nothing(f"the update's own errors hide what it is made of: {ranks}", started)


def _nothing(reason: str, started: float, tokens: Sequence[Tensor] = ()) -> BatchRecovery:
    ids = tuple(all_tokens(tokens).tolist()) if tokens else ()
    status = Status.INEXACT if ids else Status.UNSOLVED
    return BatchRecovery(status, reason, METHOD, (), (), ids, 0, time.perf_counter() - started)


def _result(
    target: Target,
    update: Update,
    batch: Batch,
    fit: Fit,
    fits: Sequence[bool],
    tokens: Tensor,
    started: float,
) -> BatchRecovery:
    verified = sum(fit.verified)
    fitting = sum(fits)
    words = f"{len(batch.texts)} of {update.texts} texts, {fitting} in the span"
    reason = f"{words}; {verified} verified: their update differs by {fit.residual:.1e} of its "
    reason += f"size, the leak's errors are {fit.errors:.1e}"
    status = Status.INEXACT if fitting or verified else Status.UNSOLVED
    status = Status.RECOVERED if verified == update.texts else status
    seconds = time.perf_counter() - started
    texts = tuple(
        _text(target, ids, fit, sure, inside, seconds / len(batch.texts))
        for ids, sure, inside in zip(batch.texts, fit.verified, fits, strict=True)
    )
    everything = tuple(sorted({*tokens.tolist(), *(id_ for ids in batch.texts for id_ in ids)}))
    return BatchRecovery(
        status, reason, METHOD, texts, batch.labels, everything, fit.passes,
        seconds, fit.residual, fit.errors,
    )  # fmt: skip


def _text(
    target: Target, ids: Sequence[int], fit: Fit, sure: bool, inside: bool, seconds: float
) -> TextRecovery:
    """One text of the batch, marked as a whole."""
    mark = Mark.VERIFIED if sure else Mark.LIKELY if inside else Mark.UNKNOWN
    status = {
        Mark.VERIFIED: Status.RECOVERED, Mark.LIKELY: Status.INEXACT, Mark.UNKNOWN: Status.UNSOLVED,
    }[mark]  # fmt: skip
    reasons = {
        Mark.VERIFIED: "the batch gives the leaked update again",
        Mark.LIKELY: "all its rows lie in the span, but the batch does not give the update again",
        Mark.UNKNOWN: "not all its rows lie in the span",
    }
    return TextRecovery(
        status=status, reason=reasons[mark], method=METHOD, ids=list(ids), text=target.decode(ids),
        verified=sure, passes=0, seconds=seconds, marks=(mark,) * len(ids), residual=fit.residual,
        precision=fit.errors, pieces=target.pieces(ids),
    )  # fmt: skip


# What the recovery of a batch from an update returns.

_ADVICE = {
    Status.RECOVERED: "Treat these gradients as the texts themselves.",
    Status.INEXACT: "Part of the batch is known, as its texts' marks say. Treat it as given away.",
    Status.UNSOLVED: "Not recovered this time, which is no proof of safety.",
    Status.NOT_IDENTIFIABLE: "More tokens than the model is wide: the span of their inputs is all "
    "there is.",
}


@dataclass(frozen=True, repr=False)
class BatchRecovery(Result):
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

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.status, self.status.advice)

    @property
    def verified(self) -> int:
        """How many texts are."""
        return sum(text.verified for text in self.texts)

    def summary(self) -> str:
        lines = [f"{self.status} ({self.reason})"]
        lines += [f"  {text.text} ({text.marked})" for text in self.texts]
        return "\n".join([*lines, f"  {self.cost}"])

    @property
    def cost(self) -> str:
        """What it took, and what to do about it."""
        return f"{self.passes:,} passes, {self.seconds:.2f} s. {self.advice}"

    def contents(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice}

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        return restored(cls, data, more=True)


# `keyhole lab capture --expose gradient` and `keyhole recover` on such files, as functions.

LONGEST = 512  # tokens of a text that a gradient is made of


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
    longest = min(LONGEST, anatomy(loaded.model).longest)
    batch = batch_of(loaded.model, loaded.tokenizer, examples, longest)
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
    overall = track("invert text", len(files))
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
