"""An assertion: this target withstands the attacks on what it exposes.

The attacks are the audit's own (audit/one_exposure.py). What comes back beyond `at_most` fails with
one line for each finding: what leaked, how much came back, of which text, and what stops it. What
no attack could check is never a pass, but `CouldNotCheck`.
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
from keyhole.core import Audit, Finding, Outcome, Skip
from keyhole.core.endpoint import EndpointOptions
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
    """No attack came to a result: nobody knows whether the target withstands."""


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
    model: str | None = None,
    known: str | Path | None = None,
    corpus: str | Path | None = None,
    sample: int = 20,
    authorized: bool = False,
    endpoint: EndpointOptions | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Audit:
    """Fail unless at most a share of `at_most` of the secret comes back; the audit, if it holds.

    `target` is what `keyhole audit` takes, a loaded model, a transformers model with its
    `tokenizer`, an oracle (any callable with `.dim`), or several oracles by name. `exposure` is
    what `keyhole lab capture --expose` takes (`hidden:3`, `kv:0`, `pooled`, `gradient`), `scores`
    for whatever an endpoint answers, or `flips`. `texts` are the secrets: a list, one text, or the
    Path of a file. `precision` says how the leak is rounded, `budget` how many queries an attacker
    of an endpoint may ask. For flips, `share` is how much of the
    attention may be cut, and `examples` are texts with their right classes; of texts alone, the
    model's own answers count as right. `model`, `known`, `corpus` and `sample` are for vector
    stores, `authorized` and `endpoint` for servers, as `keyhole.audit` takes them.

    `at_most` is a share of tokens where text is sought, of right answers where predictions are.
    """
    __tracebackhide__ = True  # pytest shows the test, not this
    if not 0 <= at_most <= 1:
        raise InputError(f"at_most must be from 0 to 1, got {at_most}")
    if examples and exposure != FLIPS:
        raise InputError(f"examples are for {FLIPS}, not for {exposure}: leave them out")
    about: dict[str, Any] = {"model": model, "known": known, "corpus": corpus, "endpoint": endpoint}
    options = AuditOptions(**about, texts=sample, seed=seed, authorized=authorized, device=device)
    with _opened(target, tokenizer, options) as opened:
        subject = _with_texts(opened, _listed(texts), [_example(each) for each in examples])
        try:
            audit = audit_exposure(
                subject, exposure, precision=precision, share=share, budget=budget, seed=seed
            )
        except (OracleError, BudgetExhausted) as error:
            raise CouldNotCheck(f"{UNCHECKED}: {error}") from error
    given = [finding for finding in audit.attacks if came_back(finding) > at_most]
    rest = [each for each in audit.attacks if each not in given]
    unchecked = [line(each) for each in rest if each.outcome is Outcome.UNCHECKED]
    unchecked += [skipped(skip) for skip in audit.skips if skip.unchecked or not audit.attacks]
    words = [f"{UNCHECKED}: {each}" for each in unchecked]
    if given:
        raise AssertionError("\n".join([*map(line, given), *words]))
    if words or not audit.attacks:
        raise CouldNotCheck("\n".join(words) or f"{UNCHECKED}: no attack reads {exposure}")
    return audit


@contextmanager
def _opened(target: Any, tokenizer: Any, options: AuditOptions) -> Generator[Target]:
    """Whatever a test has at hand, as the audit takes it."""
    if is_model(target):
        with lent(target, tokenizer) as loaded:
            yield _model(loaded, options)
        return
    if tokenizer is not None:
        raise InputError("a tokenizer goes with a transformers model only")
    if isinstance(target, str | Path):
        yield open_target(str(target), options)
    elif isinstance(target, Loaded):
        yield _model(target, options)
    else:
        yield target_of(target)


def _model(loaded: Loaded, options: AuditOptions) -> Target:
    if options.model or options.known:
        raise InputError(f"model and known are for a vector store, and {loaded.name} is a model")
    return target_of(TextTarget(loaded, demo.TEXTS, corpus=corpus_file(options.corpus)))


def _with_texts(target: Target, texts: Sequence[str] | None, examples: Sequence[Example]) -> Target:
    """The models of a target with a test's own texts instead of those that ship."""
    if texts is None and not examples:
        return target
    if not target.models:
        raise InputError(f"texts are for a model, and {target.name or 'an endpoint'} is none")
    given = texts or [example.text for example in examples]
    parts = tuple(
        ModelPart(
            part.name,
            replace(part.target, texts=given, examples=examples, notes=(), about="", hardened=None),
        )
        if isinstance(part, ModelPart)
        else part
        for part in target.parts
    )
    return replace(target, parts=parts)


def _listed(texts: Texts | None) -> Sequence[str] | None:
    if texts is None:
        return None
    if isinstance(texts, Path):
        return read_texts(texts)
    listed = [texts] if isinstance(texts, str) else list(texts)
    if not listed or not all(isinstance(text, str) for text in cast("list[Any]", listed)):
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
    """What an attack made of one exposure; the fix only where there is something to fix."""
    what = wording.exposure(finding.exposure)
    if finding.attack:
        part = f"{finding.part}, " if finding.part else ""
        what = f"{part}{what} ({finding.attack})"
    if finding.outcome is Outcome.UNCHECKED and not came_back(finding):
        return _plain(f"{what}: {finding.reason}")
    read = inert(wording.example(finding), _MAX_LETTERS)
    told = f"{what}: {wording.outcome(finding)}, {cost(finding)}"
    told += f", such as “{read}”" if read else ""
    return _plain(f"{told}. Fix: {finding.remedy}" if came_back(finding) else told)


def skipped(skip: Skip) -> str:
    return _plain(f"{wording.skip(skip)}: {skip.reason}")


def came_back(finding: Finding) -> float:
    """The share of the secret that the attacker has: of tokens, of right answers; or all of it."""
    if finding.sought in ("text", "prediction"):
        return finding.known
    return float(finding.outcome is Outcome.GIVEN_AWAY)


def _plain(text: str) -> str:
    """One line, control characters spelled out: recovered text must not steer a terminal."""
    return visible(" ".join(text.split()))
