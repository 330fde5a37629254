"""Checks of gradients: can a batch of texts be read from the gradient that a client would share?

The auditor computes the gradient of its texts with the model's own loss, in float32 and
in the precision in which gradients are often sent. The attack gets the model and the
gradient, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import eq

import torch

from keyhole.audit.check import Check, Checked, one_finding, skipped_check
from keyhole.audit.texts import (
    PARTLY,
    TextTarget,
    max_length_of,
    no_precision,
    originals_of,
    readings_of,
    share_by_chance,
    status_of,
    summary,
)
from keyhole.core import Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Readings
from keyhole.core.progress import Track
from keyhole.core.text import percent
from keyhole.data import NO_LABEL, Example
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import head_of
from keyhole.recover.gradients import BatchRecovery, batch_of, recover_batch, update_of
from keyhole.recover.gradients.update import KIND, TASKS
from keyhole.recover.originals import Original
from keyhole.recover.recovery import TextRecovery
from keyhole.report import words

EXPOSURE = Exposure("KH-TEXT-GRADIENT")
REMEDY = (
    "Treat gradients as the texts themselves: add noise (DP-SGD) or sum them over clients before "
    "anybody sees them; clipping and hiding the embeddings do not help, rounding only in part."
)
_PRECISIONS = ("float32", "bfloat16")
_MAX_WEIGHTS = 1 << 28  # of a model whose gradient an audit computes


def checks(
    part: str,
    target: TextTarget,
    seed: int,
) -> list[Check]:
    """Return the check of a model, or the reason why its gradients are not read."""
    del seed  # nothing here is random
    model = target.loaded.model
    reason = ""
    if head_of(model) not in TASKS:
        reason = "the model has no head, so no loss: a client would train one"
    elif anatomy(model).layers < 2:
        reason = "texts are put together by the second block, and the model has one"
    elif not all(each and each.projections for each in anatomy(model).attentions[:2]):
        reason = (
            "queries, keys and values of the first blocks are not one linear map each"
        )
    elif next(model.parameters()).dtype != torch.float32:
        reason = (
            "a gradient in half precision is not read: on a CPU it is made in float32"
        )
    elif sum(each.numel() for each in model.parameters()) > _MAX_WEIGHTS:
        reason = "takes longer than an audit: keyhole lab capture --expose gradient, then recover"
    if reason:
        return [skipped_check(Skip(EXPOSURE, "none", reason))]
    exposure = replace(EXPOSURE, part=part)
    if not target.tried(_PRECISIONS):
        return [skipped_check(no_precision(exposure))]
    return [Check(exposure, partial(_check, exposure, target), weight=3)]


def _check(
    exposure: Exposure,
    target: TextTarget,
    track: Track,
) -> Checked:
    loaded = target.loaded
    max_length = max_length_of(loaded.model)
    examples = [Example("", NO_LABEL, text) for text in target.texts]
    batch = batch_of(loaded.model, loaded.tokenizer, examples, max_length)
    originals = originals_of(loaded, target.texts)
    precisions = target.tried(_PRECISIONS)
    progress = track(words.exposure(exposure), len(precisions))
    results: list[Readings] = []
    recoveries: list[BatchRecovery] = []
    for number, precision in enumerate(precisions, 1):
        update = update_of(loaded.model, batch, precision=precision)
        recovery = recover_batch(loaded.model, loaded.tokenizer, update)
        nearest = [_most_similar(original, recovery) for original in originals]
        readings = readings_of(loaded.tokenizer, originals, nearest)
        chance = share_by_chance(loaded.tokenizer, originals, nearest, max_length)
        # For each text, the most similar of all recovered ones counts: chance has as
        # many tries.
        chance = min(1.0, chance * max(1, len(recovery.texts)))
        results.append(Readings(KIND, 1, precision, readings, chance))
        recoveries.append(recovery)
        progress(number)
    first = results[0]
    status = status_of(first)
    reason = summary(results)
    if not recoveries[0].texts:
        known = _tokens_known(originals, recoveries[0])
        if known >= PARTLY:
            status = Status.INEXACT
            reason += f"; {percent(known)} of the batch's tokens known, in no order"
        else:  # an attack that does not apply has not found the texts to be kept
            status = recoveries[0].status
            reason += f"; {recoveries[0].reason}"
    return one_finding(
        exposure,
        "GradientSpans",
        status,
        reason,
        REMEDY,
        known=first.known,
        sought="text",
        texts=tuple(results),
    )


def _most_similar(original: Original, recovery: BatchRecovery) -> TextRecovery:
    """Return the recovered text that has most tokens of the original: a batch has no order."""
    none = TextRecovery(Status.UNSOLVED, "", recovery.method, [], "", False, 0, 0.0)

    def similarity(text: TextRecovery) -> float:
        same = sum(map(eq, original.ids, text.ids))
        return 2 * same / max(1, len(original.ids) + len(text.ids))

    return max([none, *recovery.texts], key=similarity)


def _tokens_known(originals: Sequence[Original], recovery: BatchRecovery) -> float:
    """Return the overlap of the tokens that the gradient shows with those of the batch."""
    truth = {id_ for each in originals for id_ in each.ids}
    shown = set(recovery.tokens)
    return len(truth & shown) / max(1, len(truth | shown))
