"""A callback for transformers' Trainer that audits the model at the end of training.

    Trainer(…, callbacks=[AuditCallback(texts)])         the page and the findings in output_dir
    AuditCallback(texts).attach_to(trainer)              and its figures in the trainer's log

The audit is the first thing at the end of training, when the best model is loaded again and before
trackers close their runs. It leaves the training as it was, also between epochs: the model's mode,
its gradients and the random numbers. An audit that fails is a report that says "could not check",
and no reason to lose a trained model, unless `strict` says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
_TEXTS = 3  # of a dataset, where none are given
_FLIPS = 12
_COLUMNS = ("text", "sentence")
NAME = "keyhole-report"

_Base: Any = transformers().TrainerCallback  # the library is an extra: one line where it is missing


class GaveAway(KeyholeError):
    """The trained model gives away more than `fail_on` allows."""


class AuditCallback(_Base):  # pyright: ignore[reportUntypedBaseClass]
    """Audit at the end of training, and every so many epochs.

    `texts` are read back, by default the first of the evaluation data or of the training data;
    `examples` are flipped, by default those with their labels. `exposures` are names that
    `assert_withstands` takes; without them every attack that applies is tried, on `layers`.
    `fail_on` is a severity from which on training ends with `GaveAway`; `every` audits after every
    so many epochs as well. `strict` lets an audit that fails end the training.
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
        self.texts, self.examples, self.exposures = texts, examples, exposures
        self.layers, self.every, self.strict, self.seed = layers, every, strict, seed
        self.fail_on = None if fail_on is None else Severity(fail_on)
        self.folder = None if folder is None else Path(folder)
        self.audit: Audit | None = None
        self._trainer: Any = None

    def attach_to(self, trainer: Any) -> AuditCallback:
        """Add this to a trainer whose log, and so its trackers, shall have the figures.

        In front of the others: trackers may end their runs at the end of training.
        """
        self._trainer = trainer
        trainer.add_callback(self)
        others = trainer.callback_handler.callbacks
        others.insert(0, others.pop())
        return self

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del control
        more = state.global_step < state.max_steps  # else the end of training is next
        if self.every is not None and more and round(state.epoch or 0) % self.every == 0:
            self._run(args, state, given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del control
        self._run(args, state, given)
        if self.audit is not None and self.fail_on is not None and state.is_world_process_zero:
            _expect_kept(assess(self.audit), self.fail_on)

    def _run(self, args: Any, state: Any, given: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        model = given["model"]
        try:
            self.audit = self._audited(model, given)
        except Exception as error:
            if self.strict:
                raise
            reason = first_line(error)
            _log.warning("keyhole could not check the model: %s", reason)
            skip = Skip(Exposure(NOT_CHECKED, "model"), "–", reason, unchecked=True)
            self.audit = Audit(type(model).__name__, "", (), (skip,), self.seed)
        self._write(self.audit, self.folder or Path(args.output_dir))
        made = figures(assess(self.audit))
        if self._trainer is not None:
            self._trainer.log(made)
        else:  # what a callback reaches by itself: the history that is saved with the model
            state.log_history.append({**made, "epoch": state.epoch, "step": state.global_step})

    def _audited(self, model: Any, given: Mapping[str, Any]) -> Audit:
        with lent(model, given.get("processing_class"), type(model).__name__) as loaded:
            examples = list(self.examples) or self._given(loaded.tokenizer, given)
            texts = list(self.texts) or [each.text for each in examples[:_TEXTS]]
            subject = TextTarget(
                loaded, texts or demo.TEXTS, self.layers,
                examples=[each for each in examples if each.label != NO_LABEL],
            )  # fmt: skip
            if not self.exposures:
                return audit(subject, seed=self.seed)
            target = target_of(subject)
            parts = [audit_exposure(target, name, seed=self.seed) for name in self.exposures]
            return replace(
                parts[0], findings=tuple(each for part in parts for each in part.findings),
                skips=tuple(dict.fromkeys(each for part in parts for each in part.skips)),
                seconds=sum(part.seconds for part in parts),
            )  # fmt: skip

    def _given(self, tokenizer: Any, given: Mapping[str, Any]) -> list[Example]:
        """The first rows of the data that there is, as texts with their labels."""
        loaders = [given.get("eval_dataloader"), given.get("train_dataloader")]
        sets = [getattr(self._trainer, "eval_dataset", None)]
        sets += [getattr(loader, "dataset", None) for loader in loaders]
        rows = next((each for each in sets if each is not None and not isinstance(each, dict)), ())
        return examples_in(cast("Iterable[Any]", rows), tokenizer)

    def _write(self, audit: Audit, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            audit.save(folder / f"{NAME}.json")
            write_text(folder / f"{NAME}.html", report.render(audit))
        except (OSError, KeyholeError) as error:  # a full disk is no reason to lose a training
            if self.strict:
                raise
            _log.warning("keyhole could not write its report: %s", error)


def figures(assessment: Assessment) -> dict[str, float]:
    """The numbers of an audit that are worth following from run to run."""
    shares = {
        f"keyhole/{card.family}": max(
            (item.share for item in assessment.exposed if item.family is card.family), default=0.0
        )
        for card in assessment.families
        if card.checked
    }
    return {
        "keyhole/exposed": float(len(assessment.exposed)),
        "keyhole/unchecked": float(assessment.unchecked),
        "keyhole/worst_score": float(max((item.score for item in assessment.items), default=0)),
        **shares,
    }


def examples_in(rows: Iterable[Any], tokenizer: Any) -> list[Example]:
    """The first rows that hold a text, or the ids of one, with their class where they have one."""
    made: list[Example] = []
    for number, row in enumerate(itertools.islice(rows, _FLIPS), 1):
        if not isinstance(row, Mapping):
            continue
        held = cast("Mapping[str, Any]", row)
        text = next((held[name] for name in _COLUMNS if isinstance(held.get(name), str)), None)
        if text is None and "input_ids" in held:
            text = decoded(tokenizer, [int(token) for token in held["input_ids"]])
        if text and text.strip():
            label = held.get("labels", held.get("label", NO_LABEL))
            made.append(Example(f"row {number}", _class(label), text))
    return made


def _class(label: Any) -> int:
    """A whole number, or a tensor of one; the tokens of a language model are no class."""
    try:
        return int(label)
    except (TypeError, ValueError, RuntimeError):
        return NO_LABEL


def _expect_kept(assessment: Assessment, least: Severity) -> None:
    tried = assessment.items or assessment.unchecked
    if not tried or assessment.severity.rank < least.rank:
        return
    lines = [
        f"{item.severity}: {words.in_full(item.finding.exposure)} ({item.finding.reason})"
        for item in assessment.items
        if item.severity.rank >= least.rank
    ]
    skips = [skip for skip in assessment.audit.skips if skip.unchecked]
    lines += [f"could not check: {words.skip(skip)} ({skip.reason})" for skip in skips]
    raise GaveAway("\n".join(lines))
