"""`recover_batch(model, tokenizer, update)`: which tokens, at which places, in which texts.

Tokens come from the first span, texts from the second, classes and last tokens from least squares,
and the judge makes the update again. The reason says what the update does not show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from keyhole.models.hooks import hooks
from keyhole.models.loading import Loaded, identity, task_of
from keyhole.models.next_token import unembedding
from keyhole.recover.attack import Target, solvable
from keyhole.recover.gradients.span import (
    FirstInputs,
    Span,
    first_inputs,
    inputs_last,
    span_of,
    tokens_in,
)
from keyhole.recover.gradients.texts import (
    DecoderTexts,
    EncoderTexts,
    Search,
    contexts_of,
    places_of,
)
from keyhole.recover.gradients.update import (
    Batch,
    Protocol,
    Update,
    batch_of,
    clean_update,
    clipped_share,
    gradient,
    load_update,
    task_for,
    update_of,
)
from keyhole.recover.judge import ODDS, Verdict
from keyhole.recover.layers.precision import rounding_of
from keyhole.recover.recovery import Mark, Recovery, TextRecovery
from keyhole.recover.simulate import MAX_LENGTH

_DIRECTIONS = 24  # of a span's complement, at random: those that an encoder's search looks along
_POSITIONS = 128  # that texts may be long, unless they turn out to be longer
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
        projections = self.target.parts.attention(number).apart
        return list(dict.fromkeys(each.module for each in projections))

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
    table = parts.positions
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
    first = parts.attention(1)
    if parts.key_heads != parts.heads:
        raise Unsuccessful(Status.NOT_APPLICABLE, "heads of this encoder share their keys")
    values = first.value.of(leaked.rows([first.value.module]).mT).mT
    rows = leaked.rows(leaked.inputs(1))
    places = places_of(rows, values, parts.heads, inputs, every, len(tokens))
    directions = leaked.span([first.output]).some_directions(_DIRECTIONS)
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


# The judge of a recovered batch: the client's update is made again from it, and compared.
#
# A batch counts only if its own update differs from the leaked one by no more than the leak's
# errors: rounding, stated noise, float32 itself, and the last bits of weights. In units of those
# the mean of the squared differences is 1 or less for the right batch, over millions of numbers. A
# text's own part of the update has to stand out from the errors, or else the text might be another
# one: its length in units of the errors is compared with what chance gives.
#
# Where the errors are larger than float32's, one wrong token might hide in them. So each token has
# an alternative, the one with the nearest embedding, in its place: the update with it has to fit
# worse by odds of V·e¹⁰ : 1 (errors being Gaussian). One that does not leaves its text unverified.

_LIMIT = 1.1  # the mean squared difference in units of the errors, at most
_FINE = 5e-4  # of the update's size: errors below it hide no token
_BLOCKS = 2  # that alternatives are compared in: more would only be stronger
_FLOAT32 = 3e-5  # of the update's root mean square: what differs between machines


_OUTCOMES = {
    Mark.VERIFIED: (Status.RECOVERED, "the batch gives the leaked update again"),
    Mark.LIKELY: (
        Status.INEXACT, "all its rows lie in the span, but the batch does not give the update again"
    ),
    Mark.UNKNOWN: (Status.UNSOLVED, "not all its rows lie in the span"),
}  # fmt: skip


def judge(
    target: Target, update: Update, batch: Batch, in_span: Sequence[bool] = ()
) -> list[Verdict]:
    """Compare a batch's own update with the leaked one: what each text is worth, as a whole.

    A text that is not verified is likely if it is `in_span`. Residual and precision are those of
    the batch, relative to the update's size.
    """
    errors = Errors.of(update, target.model)
    given = clean_update(target.model, batch, update.protocol)
    count, misfit, far, size, error = 0, 0.0, 0.0, 0.0, 0.0
    for name in update.values:
        leaked, own = update.values[name].to(target.parts.device).double(), given[name].double()
        variance, off = errors.variance(name), (leaked - own).square()
        live = (leaked != 0) | (own != 0)
        count += int(live.sum())
        misfit += float((off / variance).sum())
        far, size = far + float(off.sum()), size + float(leaked.square().sum())
        error += float((variance * live).sum())
    residual, precision = (math.sqrt(each / max(size, 1e-300)) for each in (far, error))
    fits = len(batch.texts) == update.texts and misfit <= _LIMIT * count
    proofs = _Proofs(target, update, batch, errors, given) if fits else None
    verdicts: list[Verdict] = []
    for number, ids in enumerate(batch.texts):
        verified, passes = proofs.holds(number, precision > _FINE) if proofs else (False, 0)
        likely = bool(in_span) and in_span[number]
        mark = Mark.VERIFIED if verified else Mark.LIKELY if likely else Mark.UNKNOWN
        status, reason = _OUTCOMES[mark]
        marks = (mark,) * len(ids)
        verdicts.append(Verdict(status, reason, verified, residual, precision, marks, passes))
    return verdicts


@dataclass(frozen=True, eq=False)
class Errors:
    """The error of every number of an update; `least` is the deviation that float32 leaves."""

    update: Update
    model: Any
    least: float

    @classmethod
    def of(cls, update: Update, model: Any) -> Errors:
        total = sum(float(each.float().square().sum()) for each in update.values.values())
        numbers = sum(int((each != 0).sum()) for each in update.values.values())
        return cls(update, model, _FLOAT32 * math.sqrt(total / max(1, numbers)))

    def variance(self, name: str) -> Tensor:
        """Of each number of one tensor."""
        return self.coarse(name) + self.least**2

    def coarse(self, name: str) -> Tensor:
        """The part that is more than float32's: rounding, noise, and the bits of weights."""
        protocol = self.update.protocol
        weight = self.model.get_parameter(name).detach()
        leaked = self.update.values[name].to(weight.device).double()
        variance = torch.full_like(leaked, protocol.noise_in(self.update.texts) ** 2)
        if self.update.precision != "float32":
            variance += rounding_of(leaked, self.update.precision)[1].square() / 12
        if protocol.steps > 1:  # a difference of weights, each of which is rounded at every step
            last = torch.exp2(torch.frexp(weight).exponent.double() - 24)
            variance += protocol.steps * last.square() / 12
        return variance


@dataclass(eq=False)
class _Proofs:
    """What speaks for each text of a batch whose update fits as a whole."""

    target: Target
    update: Update
    batch: Batch
    errors: Errors
    given: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        model, parts = self.target.model, self.target.parts
        self._weights = {name: each.detach() for name, each in model.named_parameters()}
        inside = {id(each) for block in parts.blocks[:_BLOCKS] for each in block.parameters()}
        names = [name for name, each in model.named_parameters() if id(each) in inside]
        self._names = [name for name in names if name in self.update.values]
        self._variance = {name: self.errors.variance(name) for name in self._names}
        self._off = {
            name: self.update.values[name].to(parts.device).double() - self.given[name].double()
            for name in self._names
        }

    def holds(self, number: int, coarse: bool) -> tuple[bool, int]:
        """Would the update show it if this text were another one? And the passes that took."""
        odds = 2 * (math.log(self.target.vocabulary) + ODDS)
        own = self._part(self.batch[number], number)
        nothing = {name: torch.zeros_like(each) for name, each in own.items()}
        if self._worse(own, nothing) < odds:
            return False, 1
        text = self.batch.texts[number]
        for place in range(len(text)) if coarse else ():
            ids = (*text[:place], self._nearest(text[place]), *text[place + 1 :])
            other = self._part(Batch((ids,), self.batch[number].labels), number)
            if self._worse(own, other) < odds:
                return False, place + 2
        return True, 1 + (len(text) if coarse else 0)

    def _part(self, text: Batch, number: int) -> dict[str, Tensor]:
        """What one text adds to the update, with the number of the text that it stands for."""
        protocol = self.update.protocol
        own = gradient(self.target.model, self._weights, text)
        share = -protocol.rate * protocol.steps if protocol.steps > 1 else 1.0
        if protocol.clip is not None:
            share *= clipped_share(own, protocol.clip)
        if self.update.task == "causal" and protocol.clip is None:
            predicted = [len(each) - 1 for each in self.batch.texts]
            share *= predicted[number] / sum(predicted)
        else:
            share /= len(self.batch.texts)
        return {name: share * own[name].double() for name in self._names}

    def _worse(self, own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        """How much worse the update fits, in squared errors, with `other` instead of `own`."""
        worse = 0.0
        for name in self._names:
            change = own[name] - other[name]
            terms = (change.square() + 2 * change * self._off[name]) / self._variance[name]
            worse += float(terms.sum())
        return worse

    def _nearest(self, token: int) -> int:
        """The other token whose embedding is nearest."""
        table = self.target.parts.table
        far = (table - table[token]).square().sum(-1)
        far[token] = torch.inf
        return int(far.argmin())


# What a batch's loss was taken of, once its texts are known: classes, or each text's last token.
#
# The loss does not show in what the layers receive, but in the gradients δ of what a linear map
# gives: with its inputs a_i known from the texts, G = Σ_i δ_i a_iᵀ is solved for the δ_i by least
# squares.
#
# - Classes: the head's own δ is p − e_y, scaled. Its only negative number is at the class y.
# - The last token of a causal model's text is predicted and never read, so no span holds it. The
#   last map of the last block has δ = Jᵀ Wᵀ (p − e_y), scaled, with W the unembedding and J the
#   Jacobian of the final norm: all tokens y are compared by direction.

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
