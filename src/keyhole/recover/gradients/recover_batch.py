"""`recover_batch(model, tokenizer, update)`: the texts, classes and tokens behind an update.

Tokens come from the span of the first layer's inputs, texts from that of the second,
and classes and last tokens from least squares; the judge makes the update again. The
reason says what the update does not show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful, environment, not_applicable
from keyhole.core.errors import InputError, expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.core.tensors import squared_norms
from keyhole.data import Example
from keyhole.models.anatomy import anatomy
from keyhole.models.demo import open_model
from keyhole.models.hooks import hooks
from keyhole.models.loading import Loaded, identity
from keyhole.models.next_token import unembedding
from keyhole.recover.attack import Target, solvable
from keyhole.recover.gradients.span import (
    FirstInputs,
    Span,
    first_inputs,
    joined,
    nearest_in,
    span_of,
    tokens_in,
)
from keyhole.recover.gradients.text_search import (
    DecoderTexts,
    EncoderTexts,
    contexts_of,
    places_of,
)
from keyhole.recover.gradients.update import (
    ADAPTER,
    CHANCE,
    Batch,
    Errors,
    Protocol,
    Update,
    batch_of,
    compared,
    inputs_last,
    judge,
    load_update,
    task_for,
    update_of,
)
from keyhole.recover.recovery import Recovery, TextRecovery
from keyhole.recover.simulate import MAX_LENGTH

# tokens that are tried at a position for each text, where spans are blurred
_NEAREST = 8
_SWEEPS = 3  # over the tokens of such a batch
_TRIALS = 300  # other batches that are tried in these sweeps
_DIRECTIONS = 64  # random directions of a span's complement in an encoder's search
_POSITIONS = 128  # positions that are tested first
METHOD = "GradientSpans"


@dataclass(frozen=True, repr=False)
class BatchRecovery(Recovery):
    """The texts of a batch, in no order, with their classes if the task has any.

    `tokens` are all ids that the update shows to be in the batch, at whatever place.
    `residual` is the difference of the batch's own update from the leaked one, and
    `precision` the size of the leak's errors, both relative to the update.
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
        """The number of verified texts."""
        return sum(text.verified for text in self.texts)

    def summary(self) -> str:
        lines = [f"{self.status} ({self.reason})"]
        lines += [f"  {text.text} ({text.marked})" for text in self.texts]
        return "\n".join([*lines, f"  {self.cost}"])


class _Given(NamedTuple):
    """The known part of a map's gradient G (out, in): `rows` = left·G·right, and their variance.

    None stands for the identity. For an adapter B·A, A's gradient is Bᵀ·G, and B's is
    G·Aᵀ.
    """

    rows: Tensor
    variance: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def through(self) -> Tensor | None:
        """The map that the inputs go through first."""
        return None if self.right is None else self.right.mT


class _Leaked:
    """An update by the modules of its model, and what it shows before any text is known."""

    def __init__(self, target: Target, update: Update) -> None:
        self.target = target
        self.update = update
        self._names = {
            id(weight): name for name, weight in target.model.named_parameters()
        }
        self.errors = Errors.of(update, target.model)

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, or None if it was not handed over."""
        return self.update.values.get(self._names.get(id(weight), ""))

    def inputs(self, number: int) -> list[nn.Module]:
        """Return the maps that block `number` (from 1) applies to its input, each once."""
        projections = self.target.parts.attention(number).apart
        return list(dict.fromkeys(each.module for each in projections))

    def given(self, map_: nn.Module) -> _Given | None:
        """Return the known part of a map's gradient, or None."""
        name = self._names[id(map_.get_parameter("weight"))]
        update = self.update
        adapters = self.update.adapters
        device = self.target.parts.device
        if name in update.values:
            rows = inputs_last(update.values[name].to(device).double(), map_)
            return _Given(rows, inputs_last(self.errors.coarse(name), map_))
        for part, other in (ADAPTER, ADAPTER[::-1]):
            own, known = (name.removesuffix("weight") + each for each in (part, other))
            if own in update.values:
                rows = update.values[own].to(device).double()
                side = adapters[known].to(device).double().mT
                left, right = (side, None) if part == ADAPTER[0] else (None, side)
                return _Given(rows, self.errors.coarse(own), left, right)
        return None

    def rows(self, maps: Sequence[nn.Module]) -> list[_Given]:
        """Return the gradients of maps with the same inputs, stacked where possible."""
        found = [each for each in map(self.given, maps) if each is not None]
        if not found:
            raise InputError(
                "this update has no gradient of the first attentions, which are read"
            )
        if len(found) == 1 or any(each.right is not None for each in found):
            return found
        rows, variance = (
            torch.cat([getattr(each, name) for each in found])
            for name in ("rows", "variance")
        )
        return [_Given(rows, variance)]

    def span(self, maps: Sequence[nn.Module]) -> Span:
        """Return the span of the inputs that these maps share."""
        spans = [
            (span_of(each.rows, each.variance), each.through)
            for each in self.rows(maps)
        ]
        through = [(span, each) for span, each in spans if each is not None]
        return joined(through) if through else spans[0][0]

    def used(self, table: nn.Embedding) -> Tensor | None:
        """Return which rows (v,) of a table the batch used: those whose gradient exceeds the noise.

        Return None where this cannot be known: a table that is tied to the head has a
        gradient for every token, and noise may hide all of them.
        """
        given = self.of(table.weight)
        if given is None:
            return None
        given = given.to(self.target.parts.device)
        noise = self.update.protocol.noise_in(self.update.texts)
        size = given.shape[1]
        # For noise alone, |row|² is σ²χ², with mean σ²d and variance 2σ⁴d.
        least = noise**2 * (size + CHANCE * math.sqrt(2 * size))
        used = squared_norms(given.double()) > least
        return used if 0 < used.sum() < len(used) else None


def recover_batch(
    model: Any,
    tokenizer: Any,
    update: Update,
) -> BatchRecovery:
    """Return the texts behind an update, verified by making the update again from them."""
    started = time.perf_counter()
    target = Target.of(model, tokenizer)
    _check(target, update)
    try:
        with solvable(model):
            recovery = _recovered(_Leaked(target, update))
    except Unsuccessful as end:
        recovery = _no_texts(end.reason, status=end.status)
    seconds = time.perf_counter() - started
    texts = tuple(
        replace(text, seconds=seconds / len(recovery.texts)) for text in recovery.texts
    )
    return replace(recovery, texts=texts, seconds=seconds)


def _recovered(leaked: _Leaked) -> BatchRecovery:
    first, second = (leaked.span(leaked.inputs(number)) for number in (1, 2))
    used = leaked.used(leaked.target.parts.tokens)
    blurred = first.blurred or second.blurred
    read: BatchRecovery | None = None
    if first.complete and second.complete and not (blurred and used is None):
        read = _by_membership(leaked, first, second, used)
    if read is None or (blurred and leaked.update.texts == 1 and not read.verified):
        guessed = _by_likelihood(leaked, first.soft, second.soft, used)
        read = guessed if read is None or guessed.texts else read
    return read


def _by_membership(
    leaked: _Leaked,
    first: Span,
    second: Span,
    used: Tensor | None,
) -> BatchRecovery:
    """Find texts all of whose inputs lie in the spans."""
    inputs, tokens = _tokens(leaked, first, used)
    if not tokens:
        return _no_texts("no token's input lies in the span of the gradient")
    every = torch.cat(tokens).unique()
    texts = _texts(leaked, second, inputs, tokens, every)
    if not texts:
        return _no_texts("no text of these tokens fits the gradient", every.tolist())
    batch = labelled(leaked, [ids for ids, _ in texts])
    in_span = [fits and second.sharp for _, fits in texts]
    return _judged(leaked, batch, in_span, tokens, every.tolist())


def _by_likelihood(
    leaked: _Leaked,
    first: Span,
    second: Span,
    used: Tensor | None,
) -> BatchRecovery:
    """Find the likeliest texts where errors or a low rank blur the spans.

    Then no test proves that a token is in the batch, but true tokens are still nearer
    to the span than others. So the nearest at every position are taken, and changed one
    by one to make the leaked update likelier: with Gaussian errors of known variance,
    its log-likelihood is −½ Σ (leaked − own)²/σ².
    """
    target = leaked.target
    update = leaked.update
    parts = target.parts
    ids = [] if used is None else used.nonzero()[:, 0].tolist()
    if not first.rank and used is None:
        ranks = f"{first.rank} and {second.rank} dimensions of the first two spans stand out"
        return _no_texts(f"the update's own errors hide what it is made of: {ranks}")
    if not first.excludes or not second.excludes:
        return _too_many(target, first if not first.excludes else second, ids)
    inputs = first_inputs(parts, _length(leaked) or _POSITIONS)
    near = list(nearest_in(inputs, first, _NEAREST * update.texts, used))
    tokens = [best for best, _ in near]
    if parts.causal:
        prefixes = DecoderTexts(
            target,
            second,
            tokens,
            update.texts,
            min(_POSITIONS, parts.max_length),
            True,
        )
        texts = list(prefixes)[: update.texts]
    elif update.texts == 1:
        texts = [_by_position(target, near)]
    else:
        every = torch.cat(tokens).unique()
        texts = [ids for ids, _ in _texts(leaked, second, inputs, tokens, every)]
    if not texts:
        return _no_texts("no text stands out from the update's errors", ids)
    return _judged(
        leaked, _likeliest(leaked, labelled(leaked, texts), tokens), (), tokens, ids
    )


def _by_position(target: Target, near: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the nearest token at each position of an encoder's only text, up to its end."""
    before, after = target.frame()
    last = len(near) - 1
    if after:
        ends = [float(scores[after[0]]) for _, scores in near]
        last = max(
            range(len(before) + 1, len(near)), key=ends.__getitem__, default=last
        )
    special = {*before, *after, *target.pads()}
    inside = [
        next((id_ for id_ in best.tolist() if id_ not in special), int(best[0]))
        for best, _ in near[len(before) : last]
    ]
    return [*before, *inside, *after]


def _likeliest(
    leaked: _Leaked,
    batch: Batch,
    tokens: Sequence[Tensor],
) -> Batch:
    """Return the batch after changes of single tokens and classes that make its update likelier."""

    def off(batch: Batch) -> float:
        return compared(leaked.target, leaked.update, batch, leaked.errors).misfit

    best = off(batch)
    trials = 0
    classes = range(int(leaked.target.model.config.num_labels)) if batch.labels else ()
    for _ in range(_SWEEPS):
        before = best
        for number, text in enumerate(batch.texts):
            changes = [(None, label) for label in classes]
            for place in range(len(text)):
                few = tokens[min(place, len(tokens) - 1)][:_NEAREST].tolist()
                changes += [(place, id_) for id_ in few]
            for place, new in changes:
                other = batch.changed(number, place, new)
                if other == batch or trials == _TRIALS:
                    continue
                trials += 1
                if (reached := off(other)) < best:
                    batch = other
                    best = reached
        if best == before:
            break
    return batch


def _check(target: Target, update: Update) -> None:
    if task_for(target.model) != update.task:
        raise InputError(
            f"the update is of a model with a head for {update.task}, "
            f"and {type(target.model).__name__} has none"
        )
    whose = identity(target.model, head=True)
    if update.model is not None and update.model != whose:
        raise InputError(
            f"the gradients are of the model {update.model}, and this is {whose}"
        )
    shapes = {name: tuple(each.shape) for name, each in target.model.named_parameters()}
    for name, each in update.values.items():
        if name in update.adapters:
            shapes[name] = tuple(update.adapters[name].shape)
        if shapes.get(name) != tuple(each.shape):
            raise InputError(
                f"expected {name} of shape {shapes.get(name)}, got {tuple(each.shape)}: "
                "is it another model's?"
            )
    if target.parts.layers < 2:
        raise InputError(
            "gradients are read in models of two blocks or more, and this has one"
        )


def _tokens(
    leaked: _Leaked,
    span: Span,
    used: Tensor | None,
) -> tuple[FirstInputs, list[Tensor]]:
    """Return the tokens that may stand at each position, and tables that reach the texts' end."""
    parts = leaked.target.parts
    known = _length(leaked)
    count = known or _POSITIONS
    while True:
        inputs = first_inputs(parts, count)
        tokens = tokens_in(inputs, span, used)
        ended = len(tokens) < inputs.positions or inputs.positions < count
        if ended or known is not None or inputs.places is None:
            return inputs, tokens
        count *= 2


def _length(leaked: _Leaked) -> int | None:
    """Return the length of the longest text, if the gradient of the positions' table shows it."""
    table = leaked.target.parts.positions
    used = None if table is None else leaked.used(table[0])
    if used is None or table is None:
        return None
    return int(used[table[1] :].sum()) or None


def _texts(
    leaked: _Leaked,
    span: Span,
    inputs: FirstInputs,
    tokens: list[Tensor],
    every: Tensor,
) -> list[tuple[list[int], bool]]:
    """Return the ids of texts, and whether all rows of each lie in the span."""
    target = leaked.target
    count = leaked.update.texts
    parts = target.parts
    if parts.causal:
        # Rows of one text are independent: no text is longer than the span has
        # dimensions.
        prefixes = DecoderTexts(
            target, span, tokens, count, min(span.rank, parts.max_length)
        )
        return [(ids, True) for ids in prefixes][:count]
    first = parts.attention(1)
    if parts.key_heads != parts.heads:
        raise not_applicable("heads of this encoder share their keys")
    value = first.apart[2]
    (values,) = leaked.rows([value.module])
    heads = parts.heads if values.left is None else 1  # Bᵀ mixes what heads give
    part = values.rows if values.left is not None else value.of(values.rows.mT).mT
    rows = [(each.rows, each.through) for each in leaked.rows(leaked.inputs(1))]
    places = places_of(rows, (part, values.through), heads, inputs, every, len(tokens))
    output = leaked.span([first.output])
    directions = output.some_directions(_DIRECTIONS) * output.complete
    contexts = contexts_of(parts, inputs, every, len(tokens), directions)
    read = EncoderTexts(target, span, contexts, tokens, places, count)
    return [(text.ids, text.fits) for text in read if text.ids]


def _too_many(
    target: Target,
    span: Span,
    ids: list[int],
) -> BatchRecovery:
    """Report that there are too many tokens; their table's own gradient may still show which."""
    reason = (
        f"the batch has as many tokens as the model is wide ({target.parts.width}) or as its "
        f"adapters' rank, or more: its span has {span.rank} dimensions and says nothing"
    )
    if ids:
        reason += f"; {len(ids)} tokens are in it, in an order and in texts that are not known"
    return _no_texts(reason, ids, Status.NOT_IDENTIFIABLE)


def _no_texts(
    reason: str,
    ids: Sequence[int] = (),
    status: Status = Status.UNSOLVED,
) -> BatchRecovery:
    status = Status.INEXACT if ids else status
    return BatchRecovery(status, reason, METHOD, (), (), tuple(ids), 0, 0.0)


def _judged(
    leaked: _Leaked,
    batch: Batch,
    in_span: Sequence[bool],
    tokens: Sequence[Tensor],
    ids: list[int],
) -> BatchRecovery:
    """Return the judge's result for a batch; `ids` are known to be in it."""
    target = leaked.target
    update = leaked.update
    verdicts = judge(target, update, batch, in_span, tokens)
    verified = sum(verdict.verified for verdict in verdicts)
    residual = verdicts[0].residual
    precision = verdicts[0].precision
    reason = (
        f"{len(batch.texts)} of {update.texts} texts, {sum(in_span)} in the span; "
        f"{verified} verified: their update differs by {residual:.1e} of its size, "
        f"the leak's errors are {precision:.1e}"
    )
    status = Status.INEXACT if any(in_span) or verified else Status.UNSOLVED
    status = Status.RECOVERED if verified == update.texts else status
    texts = tuple(
        TextRecovery(
            status=verdict.status,
            reason=verdict.reason,
            method=METHOD,
            ids=list(text),
            text=target.decode(text),
            verified=verdict.verified,
            passes=0,
            seconds=0.0,
            marks=verdict.marks,
            residual=residual,
            precision=precision,
            pieces=target.pieces(text),
        )
        for text, verdict in zip(batch.texts, verdicts, strict=True)
    )
    everything = tuple(sorted({*ids, *chain.from_iterable(batch.texts)}))
    passes = 1 + sum(verdict.forwards for verdict in verdicts)
    return BatchRecovery(
        status,
        reason,
        METHOD,
        texts,
        batch.labels,
        everything,
        passes,
        0.0,
        residual,
        precision,
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
    """Save the update that a client would hand over for one batch of texts.

    `model` is what the command line takes, or a model loaded with its head. Texts
    without a class get the model's own answer. `hide` leaves out the gradients of
    `embeddings`.
    """
    expect_seed(seed)
    loaded = open_model(model, None, device, allow_pickle)
    max_length = min(MAX_LENGTH, anatomy(loaded.model).max_length)
    batch = batch_of(loaded.model, loaded.tokenizer, examples, max_length)
    update = update_of(
        loaded.model, batch, protocol, hide=hide, precision=precision, seed=seed
    )
    update.save(out)
    return update


def recovering_updates(
    loaded: Loaded,
    files: Sequence[str | Path],
    track: Track = untracked,
) -> Iterator[tuple[Path, BatchRecovery]]:
    """Yield the batch behind each file of gradients."""
    overall = track("recover", len(files))
    for number, file in enumerate(files, 1):
        update = load_update(file)
        yield Path(file), recover_batch(loaded.model, loaded.tokenizer, update)
        overall(number, note=Path(file).name)


# The targets of a batch's loss, once its texts are known: classes, or each text's last
# token.
#
# They do not show in the layers' inputs, but in the gradients δ of a linear map's
# outputs: with its inputs a_i known from the texts, G = Σ_i δ_i a_iᵀ is solved for the
# δ_i by least squares.
#
# - Classes: the head's own δ is p − e_y, scaled. Its only negative number is at the class y.
# - The last token of a causal model's text is predicted and never an input, so no span shows it.
#   The last map of the last block has δ = Jᵀ Wᵀ (p − e_y), scaled, with W the unembedding and J
#   the Jacobian of the final norm: all tokens y are compared by direction.

Texts = Sequence[Sequence[int]]


def labelled(leaked: _Leaked, texts: Texts) -> Batch:
    """Return the whole batch: texts with their classes, or with their last tokens."""
    # Weights move against the gradient.
    sign = -1.0 if leaked.update.protocol.steps > 1 else 1.0
    if leaked.update.task == "classification":
        return Batch(tuple(map(tuple, texts)), tuple(_classes(leaked, texts, sign)))
    ends = _last_tokens(leaked, texts, sign)
    return Batch(tuple((*text, end) for text, end in zip(texts, ends, strict=True)))


def _classes(
    leaked: _Leaked,
    texts: Texts,
    sign: float,
) -> list[int]:
    target = leaked.target
    head = _head(target.model)
    given = leaked.given(head)
    if given is None:
        raise InputError(
            "this update has no gradient of the head, which classes show in"
        )
    # A causal model's head is applied at every position, and answers at the last one.
    inputs = [
        each[-1] if each.ndim > 1 else each for each in _inputs(target, head, texts)
    ]
    return (sign * _deltas(torch.stack(inputs), given)).argmin(-1).tolist()


def _last_tokens(
    leaked: _Leaked,
    texts: Texts,
    sign: float,
) -> list[int]:
    """Return the token after each text, which its last position was to predict."""
    target = leaked.target
    linear = _last_map(target)
    given = leaked.given(linear)
    norm = target.parts.closing_norm(target.parts.layers)
    if given is None or norm is None:
        raise InputError(
            "this update has no gradient of the last block, where last tokens show"
        )
    deltas = sign * _deltas(torch.cat(_inputs(target, linear, texts)), given)
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
        wanted = wanted if given.left is None else wanted @ given.left.mT
        tokens.append(int(torch.cosine_similarity(wanted, deltas[end][None]).argmax()))
    return tokens


def _inputs(
    target: Target,
    module: nn.Module,
    texts: Texts,
) -> list[Tensor]:
    """Return the inputs of a module for each text."""
    taken: list[Tensor] = []

    def take(_module: nn.Module, args: tuple[Any, ...]) -> None:
        taken.append(args[0][0])

    with torch.no_grad(), hooks((module.register_forward_pre_hook, take)):
        for text in texts:
            target.model(
                input_ids=torch.tensor([list(text)], device=target.parts.device)
            )
    return taken


def _deltas(inputs: Tensor, given: _Given) -> Tensor:
    """Return the δ (rows, outputs) behind a gradient, by least squares."""
    inputs = inputs.double() if given.right is None else inputs.double() @ given.right
    return torch.linalg.pinv(inputs.mT, rtol=1e-9) @ given.rows.mT


def _head(model: Any) -> nn.Linear:
    """Return the linear map that gives a classifier's answers."""
    classes = int(model.config.num_labels)
    maps = [module for module in model.modules() if isinstance(module, nn.Linear)]
    fitting = [linear for linear in maps if linear.out_features == classes]
    if not fitting:
        raise InputError(f"this model has no linear head of {classes} classes")
    return fitting[-1]


def _last_map(target: Target) -> Any:
    """Return the linear map of the last block that is applied last."""
    called: list[nn.Module] = []
    block = target.parts.blocks[-1]
    # GPT-2 calls its linear maps Conv1D.
    maps = [
        each for each in block.modules() if type(each).__name__ in ("Linear", "Conv1D")
    ]

    def note(module: nn.Module, _args: Any) -> None:
        called.append(module)

    with (
        torch.no_grad(),
        hooks(*((linear.register_forward_pre_hook, note) for linear in maps)),
    ):
        target.model(input_ids=torch.tensor([[0, 0]], device=target.parts.device))
    return called[-1]
