"""What an endpoint that takes texts gives away: labels, probabilities, logits, vectors.

Its weights cannot be asked for with questions of one's own choice, so every kind of answer is named
and judged by what is known to be read of it: a vector for each token is as good as the text, a
vector for a whole text is read as a store's is, and a few numbers or a label are read by no attack,
which the reason states and is no proof of safety.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from keyhole.audit.check import Check, Checked, Part
from keyhole.core import Finding, Skip, Status
from keyhole.core.endpoint import EndpointOptions, without_password
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.models.loading import Loaded
from keyhole.oracle.open_inference import FLOATS, Output, TextEndpoint
from keyhole.oracle.protocol import OracleError

_SUM = 1e-3  # how far rounded probabilities may add up to other than 1
_IDS = ((5, 6, 7, 8, 9, 10), (11, 12, 13, 14), (20, 21, 22, 23, 24))  # where no vocabulary is known
_STATES, _LABELS, _CLASSES, _VECTOR, _SCORE = (  # variants of KH-TEXT-ANSWERS
    "token-vectors", "labels", "classes", "vector", "score",
)  # fmt: skip
_REMEDIES = {
    _STATES: "Return a label, or one vector for the whole text: token vectors are as good as text.",
    _VECTOR: "Guard embeddings like the texts themselves: keyhole audit reads stored ones.",
    _CLASSES: "Return the label alone, or round to what clients need.",
    _SCORE: "Round to what clients need.",
    _LABELS: "Limit how often clients may ask.",
}

_COMMANDS = {  # what reads texts from such answers, saved to a file
    _STATES: "keyhole recover MODEL STATES.safetensors",
    _VECTOR: "keyhole audit VECTORS.npy --model MODEL",
}


@dataclass(frozen=True, eq=False)
class AnswersTarget(Part):
    """An endpoint of texts, how it is asked, and its model, whose tokens it takes, if known."""

    url: str = field(repr=False)  # as it was given, maybe with a password
    model: str
    options: EndpointOptions
    loaded: Loaded | None
    texts: Sequence[str]
    name: str = ""
    observed = True

    @property
    def identity(self) -> str:
        weights = "" if self.loaded is None else f"; {self.loaded.identity}"
        address = f"{without_password(self.url)}/v2/models/{self.model}"
        return f"{address}{self.options.chosen}{weights}"

    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]:  # noqa: ARG002
        exposure = Exposure("KH-TEXT-ANSWERS", part=self.name)
        return [Check(exposure, partial(_check, exposure, self))]


def _check(exposure: Exposure, target: AnswersTarget, track: Track) -> Checked:
    """Every output for every text; then each output by itself."""
    started = time.perf_counter()
    progress = track("answers to texts", len(target.texts))
    given: dict[str, list[Output]] = {}
    try:
        with closing(TextEndpoint(target.url, target.model, target.options)) as endpoint:
            for number, question in enumerate(_questions(endpoint, target)):
                for output in endpoint.ask(question):
                    given.setdefault(output.name, []).append(output)
                progress(number + 1)
    except OracleError as error:
        return Checked(skips=(Skip(exposure, "asked", str(error), unchecked=True),))
    findings = [
        _finding(exposure, name, outputs, time.perf_counter() - started)
        for name, outputs in given.items()
    ]
    return Checked(tuple(findings))


def _questions(endpoint: TextEndpoint, target: AnswersTarget) -> list[str | Sequence[int]]:
    """The texts, or their tokens: those of the model, or any where its words are not known."""
    if endpoint.takes_texts:
        return list(target.texts)
    max_length = endpoint.length or 512
    if target.loaded is None:
        return [ids[:max_length] for ids in _IDS[: len(target.texts)]]
    return [target.loaded.tokenizer(text)["input_ids"][:max_length] for text in target.texts]


def _finding(exposure: Exposure, name: str, outputs: Sequence[Output], seconds: float) -> Finding:
    kind, words = _kind(name, outputs)
    reason = f"answers {len(outputs)} texts with {words}"
    status = Status.EXPOSED if kind in _COMMANDS else Status.NOT_APPLICABLE
    if kind not in _COMMANDS:
        reason = f"{reason}; no attack reads weights or texts from that"
    return Finding(
        exposure=replace(exposure, variant=kind, name=name), attack="asked",
        status=status, reason=reason, remedy=_REMEDIES[kind], queries=len(outputs),
        seconds=seconds, sought="token states" if kind == _STATES else "answers",
        command=_COMMANDS.get(kind, ""),
    )  # fmt: skip


def _kind(name: str, outputs: Sequence[Output]) -> tuple[str, str]:
    """What an output is, by its shape and by what its numbers add up to."""
    first = outputs[0]
    if first.values is None:
        labels = sorted({label for output in outputs for label in output.labels})
        return _LABELS, f"labels ({', '.join(repr(label[:20]) for label in labels[:4])})"
    values = [output.values for output in outputs if output.values is not None]
    if first.datatype and first.datatype not in FLOATS and first.values.numel() == 1:
        return _LABELS, f"the number of a class, in {first.datatype}"
    rows = torch.cat([value.reshape(-1, value.shape[-1] if value.ndim else 1) for value in values])
    count = rows.shape[1]
    if first.values.ndim > 1:
        return _STATES, f"{count:,} numbers for each token, {_numbers(name, rows)}"
    if count == 1:
        return _SCORE, "one number"
    numbers = _numbers(name, rows)
    vector = numbers in ("of length one", "of any size") and "logit" not in name.lower()
    if vector and (count > 32 or numbers == "of length one"):
        return _VECTOR, f"{count:,} numbers, {numbers}"
    return _CLASSES, f"{count:,} numbers, {numbers}"


def _numbers(name: str, rows: Tensor) -> str:
    if bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() <= _SUM).all()):
        return "probabilities"
    if bool((rows <= 0).all()) and bool((rows.logsumexp(1).abs() <= _SUM).all()):
        return "log-probabilities"
    if rows.shape[1] > 2 and bool(((rows.norm(dim=1) - 1).abs() <= _SUM).all()):
        return "of length one"
    return "logits" if "logit" in name.lower() else "of any size"
