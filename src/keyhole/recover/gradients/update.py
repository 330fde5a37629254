"""The update that a client makes of a batch of texts, and the judge that makes it again.

`update_of` takes a model and a batch, and returns what a client hands over (`Update`).
`judge` takes an update and a recovered batch, and returns a `Verdict` for each text.

An update holds one tensor for each parameter that the client hands over: the gradient
of its loss or, after several local steps, the difference of its weights. The protocol
of the exchange is public, so the update states it; it has no field for the texts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from keyhole.core import Status
from keyhole.core.errors import InputError, expect_among, expect_count, expect_number
from keyhole.core.files import parse, read_tensors, write_tensors
from keyhole.core.tensors import seeded, squared_norms
from keyhole.data import NO_LABEL, Example
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import head_of, identity
from keyhole.recover.attack import Target
from keyhole.recover.layers.judge import duplicated
from keyhole.recover.layers.precision import rounding_of
from keyhole.recover.leaks import FORMAT
from keyhole.recover.recovery import Mark, Verdict, marks_of, verifying_margin
from keyhole.recover.simulate import token_ids

KIND = "gradient"
PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TASKS = ("classification", "causal")
HIDDEN = ("embeddings",)
Weights = Mapping[str, Tensor]
DELTA = 1e-5  # of (ε, δ)-differential privacy
_IGNORED = -100  # a token whose prediction is not part of the loss
# the standard deviation of B's numbers in adapters that have been trained
_TRAINED = 0.01
ADAPTER = ("lora_A.weight", "lora_B.weight")  # how the names of an adapter end
LINEAR = ("Linear", "Conv1D")  # classes of linear maps: GPT-2 has its own
# prefix of the names of adapters in a file, which their gradients have too
_PUBLIC = "adapter:"
CHANCE = 6.0  # standard deviations from the mean that noise stays within
_LIMIT = 1.1  # the largest mean squared difference in units of the errors
_FINE = 5e-4  # of the update's size: smaller errors hide no token
_ALTERNATIVES = 4  # other tokens that are compared at each place
_BLOCKS = 2  # blocks whose gradients are compared: more would only be stronger evidence
_FLOAT32 = 3e-5  # of the update's root mean square: the difference between machines


@dataclass(frozen=True)
class Protocol:
    """The rules by which a client makes its update of a batch.

    With `clip`, each text's own gradient is scaled down to that length at most, and
    noise of `noise` times that length is added to their sum (DP-SGD, arXiv 1607.00133).
    With `steps` above one, the client takes so many steps of gradient descent of size
    `rate` on the same batch, and hands over the difference of its weights. `epsilon`
    sets the noise by the privacy that it gives.

    With `lora`, only adapters of that rank and the head are trained (LoRA, arXiv
    2106.09685): every map of a block is W + B·A, and the gradients of A and B leak.
    Before training, B is zero and so is A's gradient; `trained` says that training has
    begun. W includes the adapters.
    """

    clip: float | None = None
    noise: float = 0.0
    steps: int = 1
    rate: float = 0.01
    epsilon: float | None = None
    lora: int | None = None
    trained: bool = True

    def __post_init__(self) -> None:
        expect_number("--clip", self.clip, above=0)
        expect_number("--noise", self.noise, least=0)
        expect_count("--local-steps", self.steps)
        expect_number("--rate", self.rate, above=0)
        expect_number("epsilon", self.epsilon, above=0)
        expect_count("lora", self.lora)
        if self.noise and self.epsilon is not None:
            raise InputError(
                "give noise or epsilon, not both: one follows from the other"
            )
        if (self.noise or self.epsilon is not None) and self.clip is None:
            raise InputError(
                "noise and epsilon need clip: both are measured by what is clipped to"
            )
        if self.lora is not None and self.steps > 1:
            raise InputError("lora works with one step only: leave out steps, or lora")

    @property
    def multiplier(self) -> float:
        """The noise in units of the length that gradients are clipped to."""
        return self.noise if self.epsilon is None else noise_for(self.epsilon)

    def noise_in(self, texts: int) -> float:
        """Return the noise (standard deviation) in each number of an update of so many texts."""
        strength = self.multiplier * (self.clip or 0.0) / texts
        return strength * self.rate if self.steps > 1 else strength


# One release of the Gaussian mechanism with noise of σ times the sensitivity is (ε, δ)-
# differentially private exactly if  Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) ≤ δ  (Balle and Wang, 2018,
# arXiv 1805.06530). Adding or removing a text changes the sum by the clipped length at
# most.


def spent(epsilon: float, noise: float) -> float:
    """Return the δ at which so much noise gives this ε."""
    near = 0.5 / noise - epsilon * noise
    far = -0.5 / noise - epsilon * noise
    return float(ndtr(near)) - math.exp(min(0.0, epsilon + float(log_ndtr(far))))


def epsilon_of(noise: float) -> float:
    """Return the ε of one release with so much noise, at δ = 1e-5; without noise, infinity."""
    if not noise:
        return math.inf
    if spent(0.0, noise) <= DELTA:
        return 0.0
    most = 0.5 / noise**2 + 9 / noise
    return _root(lambda epsilon: spent(epsilon, noise), 0.0, most)


def noise_for(epsilon: float) -> float:
    """Return the noise that gives this ε in one release, at δ = 1e-5."""
    return math.exp(_root(lambda log: spent(epsilon, math.exp(log)), -27.0, 27.0))


def _root(
    delta: Callable[[float], float],
    low: float,
    high: float,
) -> float:
    def off(x: float) -> float:
        return delta(x) - DELTA

    return cast("float", brentq(off, low, high))


@dataclass(frozen=True, eq=False)
class Update:
    """One tensor for each parameter that was handed over, by its name in the model.

    `texts` is the size of the batch. `task` names the loss: the cross-entropy of
    classes, or of each next token. `precision` is how the numbers were rounded, and
    `model` the identity of the model with its head, None if unknown. `adapters` are the
    A (r, in) and B (out, r) of each map that has one, which the server knows, by the
    names of `values`.
    """

    values: Mapping[str, Tensor]
    task: str
    texts: int
    protocol: Protocol = field(default_factory=Protocol)
    precision: str = "float32"
    model: str | None = None
    adapters: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        expect_among("task", self.task, TASKS)
        expect_count("the number of texts", self.texts)
        expect_among("precision", self.precision, PRECISIONS)
        if not self.values:
            reason = "an update must hold the gradient of at least one parameter"
            raise InputError(reason)
        for name, tensor in self.values.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                reason = f"the gradient of {name} must be finite floating-point numbers"
                raise InputError(reason)

    @property
    def what(self) -> str:
        """What was handed over, in words."""
        what = "difference of weights" if self.protocol.steps > 1 else "gradient"
        if self.protocol.lora:
            return f"{what} of adapters of rank {self.protocol.lora}"
        return what

    def save(self, path: str | Path) -> None:
        """Write the update as .safetensors, atomically."""
        names = ("task", "texts", "precision", "model")
        about = {name: getattr(self, name) for name in names}
        about = json.dumps({**about, "protocol": asdict(self.protocol)})
        metadata = {"keyhole": FORMAT, "leak": KIND, "about": about}
        public = {_PUBLIC + name: tensor for name, tensor in self.adapters.items()}
        write_tensors(path, {**self.values, **public}, metadata)


def is_update(path: str | Path) -> bool:
    """Return whether a file is an update, and not a leak of one text; read no tensors for it."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("leak") == KIND
    except (OSError, SafetensorError):
        return False  # the error comes when the file is read as a leak


def load_update(path: str | Path) -> Update:
    """Read an update that `save` wrote; raise InputError for any other file."""
    metadata, tensors = read_tensors(path, "a file of gradients")
    if metadata.get("keyhole") != FORMAT or metadata.get("leak") != KIND:
        raise InputError(f"not a file of gradients written by Keyhole: {path}")
    public = [name for name in tensors if name.startswith(_PUBLIC)]
    adapters = {name.removeprefix(_PUBLIC): tensors.pop(name) for name in public}
    try:
        about: dict[str, Any] = parse(metadata["about"])
        protocol = Protocol(**about.pop("protocol"))
        return Update(tensors, protocol=protocol, adapters=adapters, **about)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"not a file of gradients written by Keyhole: {path}: {error}"
        ) from error


@dataclass(frozen=True)
class Batch:
    """Token ids of each text, and the classes of the texts if the task has classes."""

    texts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise InputError("a batch must hold texts of one token or more")

    def __getitem__(self, number: int) -> Batch:
        """Return a batch of one of the texts."""
        return Batch((self.texts[number],), self.labels[number : number + 1])

    def changed(
        self,
        number: int,
        place: int | None,
        new: int,
    ) -> Batch:
        """Return the batch with another token at a place of one text, or another class of it."""
        texts = [list(text) for text in self.texts]
        labels = list(self.labels)
        if place is None:
            labels[number] = new
        else:
            texts[number][place] = new
        return Batch(tuple(map(tuple, texts)), tuple(labels))

    def padded(self, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids and mask (b, n), with padding after the texts."""
        texts = [torch.tensor(text, device=device) for text in self.texts]
        ids = pad_sequence(texts, batch_first=True, padding_value=pad)
        marks = [torch.ones_like(text) for text in texts]
        return ids, pad_sequence(marks, batch_first=True)


def batch_of(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    max_length: int,
) -> Batch:
    """Tokenize texts; those without a class get the model's own answer."""
    texts = [
        tuple(token_ids(tokenizer, example.text, max_length)) for example in examples
    ]
    if task_for(model) == "causal":
        if min(map(len, texts), default=2) < 2:
            reason = "texts must have two tokens or more: the second is predicted"
            raise InputError(reason)
        return Batch(tuple(texts))
    classes = int(model.config.num_labels)
    if classes < 2:
        reason = f"a classifier needs two classes or more, and this one has {classes}"
        raise InputError(reason)
    labels = [example.label for example in examples]
    for number, text in enumerate(texts):
        if labels[number] == NO_LABEL:
            ids = torch.tensor([text], device=anatomy(model).device)
            with torch.no_grad():
                labels[number] = int(model(input_ids=ids).logits[0].argmax())
        if not 0 <= labels[number] < classes:
            got = labels[number]
            raise InputError(f"classes must be from 0 to {classes - 1}: got {got}")
    return Batch(tuple(texts), tuple(labels))


def task_for(model: Any) -> str:
    """Return the task of the model's head, which its loss is for."""
    task = head_of(model)
    if task not in TASKS:
        kind = type(model).__name__
        raise InputError(
            f"the model needs a head for classes or next tokens, and {kind} has none"
        )
    return task


# The client. The same function makes an update to attack and the one that the judge
# compares with it, so that both are computed in one way. Dropout is off.


def update_of(
    model: Any,
    batch: Batch,
    protocol: Protocol | None = None,
    *,
    hide: Sequence[str] = (),
    precision: str = "float32",
    seed: int = 0,
) -> Update:
    """Return what a client hands over for a batch; `hide` may leave out the `embeddings`."""
    protocol = protocol or Protocol()
    adapters = adapters_of(model, protocol, seed)
    expect_among("--precision", precision, PRECISIONS)
    for what in hide:
        expect_among("--hide", what, HIDDEN)
    values = clean_update(model, batch, protocol, adapters)
    strength = protocol.noise_in(len(batch.texts))
    stream = seeded(seed)
    for name, tensor in values.items():
        if strength:
            noise = torch.randn(tensor.shape, generator=stream).to(tensor)
            tensor = tensor + strength * noise
        values[name] = tensor.to(PRECISIONS[precision]).cpu()
    if hide:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                values.pop(f"{name}.weight", None)
    return Update(
        values,
        task_for(model),
        len(batch.texts),
        protocol,
        precision,
        identity(model, head=True),
        adapters,
    )


def adapters_of(
    model: Any,
    protocol: Protocol,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return A and B of every linear map of the blocks, as they start or after training."""
    if protocol.lora is None:
        return {}
    stream = seeded(seed)
    scale = _TRAINED if protocol.trained else 0.0
    given: dict[str, Tensor] = {}
    inside = {module for block in anatomy(model).blocks for module in block.modules()}
    for name, module in model.named_modules():
        if module in inside and type(module).__name__ in LINEAR:
            outputs, inputs = inputs_last(module.weight, module).shape
            drawn = torch.rand(protocol.lora, inputs, generator=stream)
            moved = torch.randn(outputs, protocol.lora, generator=stream)
            given[f"{name}.{ADAPTER[0]}"] = (2 * drawn - 1) / inputs**0.5
            given[f"{name}.{ADAPTER[1]}"] = scale * moved
    return given


def adapted(
    model: Any,
    gradients: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the gradients of adapters and of the head, from those of all weights.

    For Y = X (W + BA)ᵀ the gradient of B is G·Aᵀ and that of A is Bᵀ·G, with G that of
    W. Gradients that are zero are not handed over.
    """
    if not adapters:
        return dict(gradients)
    base = anatomy(model).base
    frozen = {id(weight) for weight in base.parameters()}
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name not in gradients:
            continue
        start = name.removesuffix("weight")
        whole = gradients[name]
        if id(weight) not in frozen:
            found[name] = whole
        elif start + ADAPTER[0] in adapters:
            whole = inputs_last(whole, model.get_submodule(start[:-1]))
            a, b = (adapters[start + each].to(whole) for each in ADAPTER)
            found[start + ADAPTER[1]] = whole @ a.mT
            if b.any():
                found[start + ADAPTER[0]] = b.mT @ whole
    return found


def inputs_last(tensor: Tensor, linear: nn.Module) -> Tensor:
    """Return a map's weights with inputs along the last axis: GPT-2 stores them first."""
    return tensor if isinstance(linear, nn.Linear) else tensor.mT


def clean_update(
    model: Any,
    batch: Batch,
    protocol: Protocol,
    adapters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return an update before noise: the gradient, or the difference of weights after steps."""
    start = {name: weight.detach() for name, weight in model.named_parameters()}
    weights = dict(start)
    gradients: dict[str, Tensor] = {}
    for _ in range(protocol.steps):
        gradients = _clipped(model, weights, batch, protocol.clip, adapters)
        if protocol.steps == 1:
            return gradients
        for name, each in gradients.items():
            weights[name] = weights[name] - protocol.rate * each
    return {name: weights[name] - start[name] for name in gradients}


def _clipped(
    model: Any,
    weights: Weights,
    batch: Batch,
    clip: float | None,
    adapters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the mean of the texts' gradients, each scaled down to the length `clip`."""
    if clip is None:
        return adapted(model, gradient(model, weights, batch), adapters)
    total: dict[str, Tensor] = {}
    for number in range(len(batch.texts)):
        own = adapted(model, gradient(model, weights, batch[number]), adapters)
        share = clipped_share(own, clip) / len(batch.texts)
        for name, tensor in own.items():
            total[name] = total.get(name, 0.0) + share * tensor
    return total


def clipped_share(gradients: Mapping[str, Tensor], clip: float) -> float:
    """Return the factor that makes a text's gradient no longer than `clip`."""
    lengths = torch.stack([tensor.norm() for tensor in gradients.values()])
    return min(1.0, clip / max(float(lengths.norm()), 1e-30))


def gradient(
    model: Any,
    weights: Weights,
    batch: Batch,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return the gradient of the mean cross-entropy for each parameter that it depends on.

    The targets are the texts' classes, or all tokens but the first of each. `only`
    names the parameters to use.
    """
    pad = int(getattr(model.config, "pad_token_id", None) or 0)
    names = list(weights if only is None else only)
    leaves = [weights[name].detach().requires_grad_() for name in names]
    ids, mask = batch.padded(pad, leaves[0].device)
    given = {"input_ids": ids, "attention_mask": mask}
    used = {**weights, **dict(zip(names, leaves, strict=True))}
    logits = functional_call(model, used, kwargs=given).logits
    if task_for(model) == "classification":
        loss = cross_entropy(logits, ids.new_tensor(batch.labels))
    else:
        following = ids.masked_fill(mask == 0, _IGNORED)[:, 1:]
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten())
    # The gradient of a parameter that the loss does not depend on is None, despite
    # torch's types.
    slopes = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(loss, leaves, allow_unused=True),
    )
    pairs = zip(names, slopes, strict=True)
    return {name: each for name, each in pairs if each is not None}


# The judge: the client's update is made again from a recovered batch, and compared.
#
# A batch fits only if its own update differs from the leaked one by no more than the
# leak's errors: rounding, stated noise, float32 itself, and the last bits of weights.
# In units of these, the mean of the squared differences is 1 or less for the right
# batch, over millions of numbers. A text's own part of the update must exceed the
# errors, or the text might be another one: with nothing in its place, the update must
# fit worse by odds of V·e¹⁰ : 1 (for Gaussian errors).
#
# Where the errors are larger than float32's, they might hide one wrong token. So each
# token has alternatives: the token of nearest embedding, those that came nearest in the
# search, and an exchange with the next token. The update with any of them must fit
# worse by the same odds, or the text is not verified. A token that nearly shares its
# embedding with another has alternatives whatever the errors: only the gradient of the
# embeddings or of the head may tell them apart.

_OUTCOMES = {
    Mark.VERIFIED: (Status.RECOVERED, "the batch gives the leaked update again"),
    Mark.LIKELY: (
        Status.INEXACT,
        "all its rows lie in the span, but the batch does not give the update again",
    ),
    Mark.UNKNOWN: (Status.UNSOLVED, "not all its rows lie in the span"),
}


def judge(
    target: Target,
    update: Update,
    batch: Batch,
    in_span: Sequence[bool] = (),
    tokens: Sequence[Tensor] = (),
) -> list[Verdict]:
    """Judge each text of a batch as a whole, by the batch's own update and the leaked one.

    A text that is not verified is likely if it is `in_span`. Residual and precision are
    those of the batch, relative to the update's size. `tokens` are alternatives at each
    position.
    """
    errors = Errors.of(update, target.model)
    found = compared(target, update, batch, errors)
    fits = len(batch.texts) == update.texts and found.misfit <= found.most
    proofs = _Proofs(target, update, batch, errors, found, tokens) if fits else None
    verdicts: list[Verdict] = []
    for number, ids in enumerate(batch.texts):
        verified = False
        passes = 0
        if proofs is not None:
            verified, passes = proofs.holds(number, found.precision > _FINE)
        likely = bool(in_span) and in_span[number]
        marks = marks_of([verified] * len(ids), [likely] * len(ids))
        status, reason = _OUTCOMES[marks[0]]
        verdicts.append(
            Verdict(
                status,
                reason,
                verified,
                found.residual,
                found.precision,
                marks,
                passes,
            )
        )
    return verdicts


class Compared(NamedTuple):
    """A batch's own update, and how far it is from the leaked one.

    `misfit` is the sum of the squared differences in units of the errors, and `most`
    its limit.
    """

    given: Mapping[str, Tensor]
    misfit: float
    most: float
    residual: float
    precision: float


def compared(
    target: Target,
    update: Update,
    batch: Batch,
    errors: Errors,
) -> Compared:
    """Compare the update of a batch with the leaked one."""
    given = clean_update(target.model, batch, update.protocol, update.adapters)
    sums = torch.zeros(5, dtype=torch.float64)
    for name, tensor in update.values.items():
        leaked = tensor.to(target.device).double()
        own = given[name].double() if name in given else torch.zeros_like(leaked)
        variance = errors.variance(name)
        off = (leaked - own).square()
        live = (leaked != 0) | (own != 0)
        parts = (live, off / variance, off, leaked.square(), variance * live)
        sums += torch.stack([part.sum().double() for part in parts]).cpu()
    count, misfit, far, size, error = sums.tolist()
    # Stated noise is known exactly: then the sum is χ², with a standard deviation of
    # √(2·count).
    most = _LIMIT * count
    if update.protocol.multiplier and update.precision == "float32":
        most = count + CHANCE * math.sqrt(2 * count)
    residual, precision = (math.sqrt(each / max(size, 1e-300)) for each in (far, error))
    return Compared(given, misfit, most, residual, precision)


class Errors(NamedTuple):
    """The errors of an update's numbers; `least` is the standard deviation of float32's."""

    update: Update
    model: Any
    least: float

    @classmethod
    def of(cls, update: Update, model: Any) -> Errors:
        tensors = update.values.values()
        total = sum(float(each.float().square().sum()) for each in tensors)
        numbers = sum(int((each != 0).sum()) for each in tensors)
        return cls(update, model, _FLOAT32 * math.sqrt(total / max(1, numbers)))

    def variance(self, name: str) -> Tensor:
        """Return the variance of each number of one tensor."""
        return self.coarse(name) + self.least**2

    def coarse(self, name: str) -> Tensor:
        """Return the variance beyond float32: of rounding, noise, and the last bits of weights."""
        protocol = self.update.protocol
        device = next(self.model.parameters()).device
        leaked = self.update.values[name].to(device).double()
        variance = torch.full_like(leaked, protocol.noise_in(self.update.texts) ** 2)
        if self.update.precision != "float32":
            variance += rounding_of(leaked, self.update.precision)[1].square() / 12
        # a difference of weights, each of which is rounded at every step
        if protocol.steps > 1:
            weight = self.model.get_parameter(name).detach()
            last = torch.exp2(torch.frexp(weight).exponent.double() - 24)
            variance += protocol.steps * last.square() / 12
        return variance


class _Proofs:
    """The evidence for each text of a batch whose update, `found`, fits as a whole."""

    def __init__(
        self,
        target: Target,
        update: Update,
        batch: Batch,
        errors: Errors,
        found: Compared,
        tokens: Sequence[Tensor],
    ) -> None:
        self.target = target
        self.update = update
        self.batch = batch
        self.tokens = tokens
        self._errors = errors
        self._misfit = found.misfit
        named = dict(target.model.named_parameters())
        self._weights = {name: each.detach() for name, each in named.items()}
        blocks = target.parts.blocks[:_BLOCKS]
        inside = {id(each) for block in blocks for each in block.parameters()}
        self._inside = [name for name, each in named.items() if id(each) in inside]
        starts = {name.removesuffix("weight") for name in self._inside}
        self._off: dict[str, Tensor] = {}
        self._variance: dict[str, Tensor] = {}
        for name, leaked in update.values.items():
            if re.sub(r"(lora_[AB]\.)?weight$", "", name) in starts:
                own = found.given[name].double()
                self._off[name] = leaked.to(target.device).double() - own
                self._variance[name] = errors.variance(name)

    def holds(self, number: int, coarse: bool) -> tuple[bool, int]:
        """Return whether the update excludes every other text, and the passes that this took."""
        verifying = verifying_margin(self.target.vocabulary)
        own = self._part(self.batch[number], number)
        nothing = {name: torch.zeros_like(each) for name, each in own.items()}
        if self._worse(own, nothing) < verifying:
            return False, 1
        text = self.batch.texts[number]
        alike = duplicated(self.target)[list(text)].tolist()
        passes = 1
        for place in range(len(text)):
            for other in self._others(number, place) if coarse or alike[place] else ():
                passes += 1
                if self._worse(own, self._part(other, number)) >= verifying:
                    continue
                if not alike[place]:
                    return False, passes
                # The same over all parameters, with the other text in its place.
                passes += 1
                texts = list(self.batch.texts)
                texts[number] = other.texts[0]
                whole = replace(self.batch, texts=tuple(texts))
                again = compared(self.target, self.update, whole, self._errors)
                if again.misfit - self._misfit < verifying:
                    return False, passes
        return True, passes

    def _others(self, number: int, place: int) -> Iterator[Batch]:
        """Yield the text with other tokens at a place: similar ones, or the next one, exchanged."""
        alone = self.batch[number]
        text = alone.texts[0]
        table = self.target.parts.table
        far = squared_norms(table - table[text[place]])
        far[text[place]] = torch.inf
        others = {int(far.argmin())}
        if self.tokens:
            few = self.tokens[min(place, len(self.tokens) - 1)][:_ALTERNATIVES]
            others.update(few.tolist())
        for id_ in others - {text[place]}:
            yield alone.changed(0, place, id_)
        if place + 1 < len(text) and text[place] != text[place + 1]:
            following = alone.changed(0, place, text[place + 1])
            yield following.changed(0, place + 1, text[place])

    def _part(self, text: Batch, number: int) -> dict[str, Tensor]:
        """Return the part of one text in the update, in place of text `number`."""
        protocol = self.update.protocol
        # clipping needs all gradients
        only = self._inside if protocol.clip is None else None
        own = gradient(self.target.model, self._weights, text, only)
        own = adapted(self.target.model, own, self.update.adapters)
        lengths = [len(each) - 1 for each in self.batch.texts]
        share = 1 / len(lengths)
        if protocol.clip is not None:
            share *= clipped_share(own, protocol.clip)
        elif self.update.task == "causal":
            share = lengths[number] / sum(lengths)
        if protocol.steps > 1:
            share *= -protocol.rate * protocol.steps
        return {name: share * own[name].double() for name in self._off}

    def _worse(self, own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        """Return how much worse the update fits, in squared errors, with `other` for `own`."""
        worse = 0.0
        for name, off in self._off.items():
            change = own[name] - other[name]
            squares = change.square() + 2 * change * off
            worse += float((squares / self._variance[name]).sum())
        return worse
