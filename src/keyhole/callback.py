"""A callback for transformers' Trainer that audits the model at the end of training.

    Trainer(…, callbacks=[AuditCallback(texts)])      writes a page and the findings to output_dir
    AuditCallback(texts).attach_to(trainer)           also writes figures to the trainer's log

The audit runs first at the end of training: after the best model is loaded again, and
before trackers close their runs. It does not change the model's mode, its gradients or
the state of random generators. An audit that fails is reported as "could not check", so
that a trained model is not lost, unless `strict` is set.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from keyhole import report
from keyhole.assess import Assessment, Severity, assess
from keyhole.audit.one_exposure import audit_exposure
from keyhole.audit.run import audit
from keyhole.audit.target import target_of
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit, Skip
from keyhole.core.errors import KeyholeError, expect_among, expect_count, first_line
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import write_text
from keyhole.data import NO_LABEL, Example
from keyhole.models import demo
from keyhole.models.loading import lent, transformers
from keyhole.models.pieces import decoded
from keyhole.report import words

_log = logging.getLogger("keyhole")
# texts and examples that are taken from the data, if none are given
_TEXTS = 3
_FLIPS = 12
_COLUMNS = ("text", "sentence")
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

    - `texts` are read back; by default the first of the evaluation data, or of the training data.
      `examples` are flipped; by default the same texts with their labels.
    - `exposures` are names that `assert_withstands` takes. Without them, every attack that applies
      is tried, on `layers`.
    - `every`: audit after this many epochs as well, each time.
    - `fail_on`: end the training with `GaveAway` from this severity on.
    - `strict`: let an audit that fails end the training.
    """

    def __init__(
        self,
        texts: Sequence[str] = (),
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
        if fail_on is not None:
            expect_among("fail_on", fail_on, Severity)
        self.texts = texts
        self.examples = examples
        self.exposures = exposures
        self.layers = layers
        self.every = every
        self.strict = strict
        self.seed = seed
        self.fail_on = None if fail_on is None else Severity(fail_on)
        self.folder = None if folder is None else Path(folder)
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

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del control
        is_last = (
            state.global_step >= state.max_steps
        )  # then the end of training is next
        if (
            self.every is not None
            and not is_last
            and round(state.epoch or 0) % self.every == 0
        ):
            self._run(args, state, given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del control
        self._run(args, state, given)
        if (
            self.audit is not None
            and self.fail_on is not None
            and state.is_world_process_zero
        ):
            _expect_withheld(assess(self.audit), self.fail_on)

    def _run(self, args: Any, state: Any, given: Mapping[str, Any]) -> None:
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
        self._write(self.audit, self.folder or Path(args.output_dir))
        numbers = figures(assess(self.audit))
        if self._trainer is not None:
            self._trainer.log(numbers)
        else:  # all that a callback can reach: the history that is saved with the model
            state.log_history.append(
                {**numbers, "epoch": state.epoch, "step": state.global_step}
            )

    def _audit(self, model: Any, given: Mapping[str, Any]) -> Audit:
        with lent(model, given.get("processing_class"), type(model).__name__) as loaded:
            examples = list(self.examples) or self._first_examples(
                loaded.tokenizer, given
            )
            texts = list(self.texts) or [each.text for each in examples[:_TEXTS]]
            subject = TextTarget(
                loaded,
                texts or demo.TEXTS,
                self.layers,
                examples=[each for each in examples if each.label != NO_LABEL],
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

    def _first_examples(
        self, tokenizer: Any, given: Mapping[str, Any]
    ) -> list[Example]:
        """Return the first rows of the evaluation or training data as examples."""
        loaders = [given.get("eval_dataloader"), given.get("train_dataloader")]
        sets = [getattr(self._trainer, "eval_dataset", None)]
        sets += [getattr(loader, "dataset", None) for loader in loaders]
        rows = next(
            (each for each in sets if each is not None and not isinstance(each, dict)),
            (),
        )
        return examples_in(cast("Iterable[Any]", rows), tokenizer)

    def _write(self, audit: Audit, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            audit.save(folder / f"{NAME}.json")
            write_text(folder / f"{NAME}.html", report.render(audit))
        except (
            OSError,
            KeyholeError,
        ) as error:  # a full disk is no reason to lose a training
            if self.strict:
                raise
            _log.warning("keyhole could not write its report: %s", error)


def figures(assessment: Assessment) -> dict[str, float]:
    """Return the numbers of an audit to compare from run to run."""
    shares = {
        f"keyhole/{card.family}": max(
            (item.share for item in assessment.exposed if item.family is card.family),
            default=0.0,
        )
        for card in assessment.families
        if card.checked
    }
    return {
        "keyhole/exposed": float(len(assessment.exposed)),
        "keyhole/unchecked": float(assessment.audit.unchecked),
        "keyhole/worst_score": float(
            max((item.score for item in assessment.items), default=0)
        ),
        **shares,
    }


def examples_in(rows: Iterable[Any], tokenizer: Any) -> list[Example]:
    """Return the first rows with a text or token ids as examples, with their labels if any."""
    examples: list[Example] = []
    for number, row in enumerate(itertools.islice(rows, _FLIPS), 1):
        if not isinstance(row, Mapping):
            continue
        fields = cast("Mapping[str, Any]", row)
        text = next(
            (fields[name] for name in _COLUMNS if isinstance(fields.get(name), str)),
            None,
        )
        if text is None and "input_ids" in fields:
            text = decoded(tokenizer, [int(token) for token in fields["input_ids"]])
        if text and text.strip():
            label = fields.get("labels", fields.get("label", NO_LABEL))
            examples.append(Example(f"row {number}", _class(label), text))
    return examples


def _class(label: Any) -> int:
    """Return a label as a number; the labels of a language model are tokens, not a class."""
    try:
        return int(label)
    except (TypeError, ValueError, RuntimeError):
        return NO_LABEL


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
