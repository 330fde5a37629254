"""A callback for transformers' Trainer that audits the model at the end of training.

    Trainer(…, callbacks=[AuditCallback(texts)])      writes a page and the findings to output_dir
    AuditCallback(texts).attach_to(trainer)           also writes figures to the trainer's log

The audit runs first at the end of training: after the best model is loaded again, and
before trackers close their runs. It does not change the model's mode, its gradients or
the state of random generators. An audit that fails is reported as "could not check", so
that a trained model is not lost, unless `strict` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole import report
from keyhole.assess import Assessment, Severity, assess
from keyhole.audit.one_exposure import audit_exposure
from keyhole.audit.run import audit
from keyhole.audit.target import target_of
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit, Skip
from keyhole.core.errors import (
    InputError,
    KeyholeError,
    expect_among,
    expect_count,
    first_line,
)
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import write_text
from keyhole.data import Example
from keyhole.models.loading import lent, transformers
from keyhole.report import words

_log = logging.getLogger("keyhole")
NAME = "keyhole-report"

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = (
        transformers().TrainerCallback
    )  # raises MissingExtra if it is missing


class GaveAway(KeyholeError):
    """The trained model gives away more than `fail_on` allows."""


class AuditCallback(TrainerCallback):
    """Audits the model at the end of training.

    - `texts` are read back, and are in the report. `examples` are flipped; by default the answers
      to these texts.
    - `exposures` are names that `assert_withstands` takes. Without them, every attack that applies
      is tried, on `layers`.
    - `every`: audit after this many epochs as well, each time.
    - `fail_on`: end the training with `GaveAway` from this severity on.
    - `strict`: let an audit that fails end the training.
    """

    def __init__(
        self,
        texts: Sequence[str],
        *,
        examples: Sequence[Example] = (),
        exposures: Sequence[str] = (),
        layers: Sequence[int] | None = None,
        every: int | None = None,
        fail_on: str | None = None,
        strict: bool = False,
        folder: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        expect_count("every", every)
        if not texts:
            raise InputError("there are no texts to read back: give one or more")
        self.fail_on: Severity | None = None
        if fail_on is not None:
            expect_among("fail_on", fail_on, Severity)
            self.fail_on = Severity(fail_on)
        self.texts = texts
        self.examples = examples
        self.exposures = exposures
        self.layers = layers
        self.every = every
        self.strict = strict
        self.seed = seed
        self.folder = folder
        self.audit: Audit | None = None
        self._trainer: Any = None

    def attach_to(self, trainer: Any) -> AuditCallback:
        """Add the callback to a trainer, and write figures to its log and its trackers.

        It goes in front of the others, because trackers may end their runs with the
        training.
        """
        self._trainer = trainer
        trainer.add_callback(self)
        others = trainer.callback_handler.callbacks
        others.insert(0, others.pop())
        return self

    def on_epoch_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **given: Any,
    ) -> None:
        del control
        is_last = state.global_step >= state.max_steps  # the end of training is next
        if is_last or self.every is None:
            return
        if round(state.epoch or 0) % self.every == 0:
            self._run(args, state, given)

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **given: Any,
    ) -> None:
        del control
        self._run(args, state, given)
        if (
            self.audit is not None
            and self.fail_on is not None
            and state.is_world_process_zero
        ):
            _expect_withheld(assess(self.audit), self.fail_on)

    def _run(
        self,
        args: Any,
        state: Any,
        given: Mapping[str, Any],
    ) -> None:
        if not state.is_world_process_zero:
            return
        model = given["model"]
        try:
            self.audit = self._audit(model, given)
        except Exception as error:
            if self.strict:
                raise
            reason = first_line(error)
            _log.warning("keyhole could not check the model: %s", reason)
            skip = Skip(Exposure(NOT_CHECKED, "model"), "–", reason, unchecked=True)
            self.audit = Audit(type(model).__name__, "", (), (skip,), self.seed)
        self._write(self.audit, Path(self.folder or args.output_dir))
        numbers = figures(assess(self.audit))
        if self._trainer is not None:
            self._trainer.log(numbers)
        else:  # all that a callback can reach: the history that is saved with the model
            state.log_history.append(
                {**numbers, "epoch": state.epoch, "step": state.global_step}
            )

    def _audit(self, model: Any, given: Mapping[str, Any]) -> Audit:
        with lent(model, given.get("processing_class"), type(model).__name__) as loaded:
            subject = TextTarget(
                loaded, self.texts, self.layers, examples=self.examples
            )
            if not self.exposures:
                return audit(subject, seed=self.seed)
            target = target_of(subject)
            parts = [
                audit_exposure(target, name, seed=self.seed) for name in self.exposures
            ]
            return replace(
                parts[0],
                findings=tuple(each for part in parts for each in part.findings),
                skips=tuple(
                    dict.fromkeys(each for part in parts for each in part.skips)
                ),
                seconds=sum(part.seconds for part in parts),
            )

    def _write(self, audit: Audit, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            audit.save(folder / f"{NAME}.json")
            write_text(folder / f"{NAME}.html", report.render(audit))
        except (OSError, KeyholeError) as error:
            if self.strict:  # else a full disk is no reason to lose a training
                raise
            _log.warning("keyhole could not write its report: %s", error)


def figures(assessment: Assessment) -> dict[str, float]:
    """Return the numbers of an audit to compare from run to run."""
    shares = {f"keyhole/{item.family}": 0.0 for item in assessment.items}
    for item in assessment.exposed:
        name = f"keyhole/{item.family}"
        shares[name] = max(shares[name], item.share)
    scores = [item.score for item in assessment.items]
    return {
        "keyhole/exposed": float(len(assessment.exposed)),
        "keyhole/unchecked": float(assessment.audit.unchecked),
        "keyhole/worst_score": float(max(scores, default=0)),
        **shares,
    }


def _expect_withheld(assessment: Assessment, least: Severity) -> None:
    """Raise if the model gives away more than allowed, or nothing could be checked."""
    tried = assessment.items or assessment.audit.unchecked
    if not tried or assessment.severity.rank < least.rank:
        return
    lines = [
        f"{item.severity}: {words.in_full(item.finding.exposure)} ({item.finding.reason})"
        for item in assessment.items
        if item.severity.rank >= least.rank
    ]
    lines += [
        f"could not check: {words.skip(skip)} ({skip.reason})"
        for skip in assessment.audit.unchecked_skips
    ]
    raise GaveAway("\n".join(lines))
