"""`assert_withstands`: assert that a target withstands the attacks on an exposure.

The attacks are those of an audit (audit/one_exposure.py). If more than `at_most` is
recovered, the assertion fails with a line for each finding: what leaked, how much was
recovered, of which text, and what stops it. If something could not be checked, it
raises `CouldNotCheck` and does not pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from keyhole.assess.severity import cost
from keyhole.audit.one_exposure import FLIPS, audit_exposure
from keyhole.audit.options import AuditOptions
from keyhole.audit.target import ModelPart, Target, corpus_file, open_target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit, Finding, Outcome
from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.text import inert, visible
from keyhole.data import NO_LABEL, Example, read_texts
from keyhole.models import Loaded, demo
from keyhole.models.loading import is_model, lent
from keyhole.oracle import BudgetExhausted, OracleError
from keyhole.report import words as wording

Texts = str | Path | Sequence[str]
Labelled = Example | str | tuple[str, int]
_MAX_LETTERS = 60  # letters of a text that a line quotes
UNCHECKED = str(Outcome.UNCHECKED)


class CouldNotCheck(KeyholeError):
    """An attack had no result, so it is unknown whether the target withstands it."""


def assert_withstands(
    target: Any,
    exposure: str,
    texts: Texts | None = None,
    *,
    tokenizer: Any = None,
    at_most: float = 0.0,
    precision: str = "float32",
    share: float | None = None,
    budget: int | None = None,
    examples: Sequence[Labelled] = (),
    sample: int = 20,
    **more: Any,
) -> Audit:
    """Fail if more than a share of `at_most` of the secret is recovered; else return the audit.

    - `target` is what `keyhole audit` takes, a loaded model, a transformers model with its
      `tokenizer`, an oracle (any callable with `.dim`), or several oracles by name.
    - `exposure` is what `keyhole lab capture --expose` takes (`hidden:3`, `kv:0`, `pooled`,
      `gradient`), `scores` for whatever an endpoint answers, or `flips`.
    - `texts` are the secrets: a list, one text, or the Path of a file.
    - `at_most` is a share of the tokens of texts, or of right answers for flips.
    - `precision` says how the leak is rounded, and `budget` how many queries an attacker of an
      endpoint may make.
    - For flips, `share` is how much of the attention may be cut, and `examples` are texts with
      their right classes; for texts alone, the model's own answers count as right.
    - Of a vector store, `sample` texts are read; its encoder is `model`. This and other options are
      those of `keyhole.audit`.
    """
    __tracebackhide__ = True  # pytest shows the test instead
    if not 0 <= at_most <= 1:
        raise InputError(f"at_most must be from 0 to 1, got {at_most}")
    if examples and exposure != FLIPS:
        raise InputError(
            f"examples are for {FLIPS}, not for {exposure}: leave them out"
        )
    options = AuditOptions(texts=sample, **more)
    with _opened(target, tokenizer, options) as opened:
        opened = _with_texts(
            opened, _list_of(texts), [_example(each) for each in examples]
        )
        try:
            audit = audit_exposure(
                opened,
                exposure,
                precision=precision,
                share=share,
                budget=budget,
                seed=options.seed,
            )
        except (OracleError, BudgetExhausted) as error:
            raise CouldNotCheck(f"{UNCHECKED}: {error}") from error
    failed = [line(each) for each in audit.attacks if recovered(each) > at_most]
    unchecked = [
        f"{UNCHECKED}: {line(each)}"
        for each in audit.attacks
        if each.outcome is Outcome.UNCHECKED and recovered(each) <= at_most
    ]
    unchecked += [
        f"{UNCHECKED}: {_one_line(f'{wording.skip(skip)}: {skip.reason}')}"
        for skip in audit.skips
        if skip.unchecked or not audit.attacks
    ]
    if failed:
        raise AssertionError("\n".join(failed + unchecked))
    if unchecked or not audit.attacks:
        raise CouldNotCheck(
            "\n".join(unchecked) or f"{UNCHECKED}: no attack reads {exposure}"
        )
    return audit


@contextmanager
def _opened(
    target: Any,
    tokenizer: Any,
    options: AuditOptions,
) -> Generator[Target]:
    """Yield whatever a test has at hand as an open target."""
    if is_model(target):
        with lent(target, tokenizer) as loaded:
            yield _model_target(loaded, options)
        return
    if tokenizer is not None:
        raise InputError("a tokenizer goes with a transformers model only")
    if isinstance(target, str | Path):
        yield open_target(str(target), options)
    elif isinstance(target, Loaded):
        yield _model_target(target, options)
    else:
        yield target_of(target)


def _model_target(loaded: Loaded, options: AuditOptions) -> Target:
    if options.model or options.known:
        raise InputError(
            f"model and known are for a vector store, and {loaded.name} is a model"
        )
    return target_of(TextTarget(loaded, demo.TEXTS, corpus=corpus_file(options.corpus)))


def _with_texts(
    target: Target,
    texts: Sequence[str] | None,
    examples: Sequence[Example],
) -> Target:
    """Return the target with a test's own texts in place of those that ship with Keyhole."""
    if texts is None and not examples:
        return target
    if not target.models:
        raise InputError(
            f"texts are for a model, and {target.name or 'an endpoint'} is none"
        )
    given = texts or [example.text for example in examples]
    own = {"texts": given, "examples": examples, "notes": (), "about": ""}
    parts = list(target.parts)
    for place, part in enumerate(parts):
        if isinstance(part, ModelPart):
            tried = replace(part.target, **own, hardened=None)
            parts[place] = ModelPart(part.name, tried)
    return replace(target, parts=tuple(parts))


def _list_of(texts: Texts | None) -> Sequence[str] | None:
    if texts is None:
        return None
    if isinstance(texts, Path):
        return read_texts(texts)
    if isinstance(texts, str):
        return [texts]
    listed = list(texts)
    if not listed or not all(
        isinstance(text, str) for text in cast("list[Any]", listed)
    ):
        raise InputError(f"expected a list of texts, got {listed!r:.60}")
    return listed


def _example(given: Labelled) -> Example:
    if isinstance(given, Example):
        return given
    if isinstance(given, str):
        return Example(given, NO_LABEL, given)
    text, label = given
    return Example(text, int(label), text)


def line(finding: Finding) -> str:
    """Describe a finding in one line, with a fix if something was recovered."""
    what = wording.exposure(finding.exposure)
    if finding.attack:
        what = ", ".join(filter(None, (finding.part, f"{what} ({finding.attack})")))
    if finding.outcome is Outcome.UNCHECKED and not recovered(finding):
        return _one_line(f"{what}: {finding.reason}")
    result = f"{what}: {wording.outcome(finding)}, {cost(finding)}"
    example = inert(wording.example(finding), _MAX_LETTERS)
    if example:
        result += f", such as “{example}”"
    if recovered(finding):
        result += f". Fix: {finding.remedy}"
    return _one_line(result)


def recovered(finding: Finding) -> float:
    """Return the share of tokens or of right answers that the attacker got; else 1 or 0."""
    if finding.sought in ("text", "prediction"):
        return finding.known
    return float(finding.outcome is Outcome.GIVEN_AWAY)


def _one_line(text: str) -> str:
    """Return text in one line without control characters, which could steer a terminal."""
    return visible(" ".join(text.split()))
