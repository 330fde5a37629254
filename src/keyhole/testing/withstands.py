"""An assertion: this target withstands the attacks on what it exposes.

The attacks are the audit's own (audit/one_exposure.py). What comes back beyond `at_most` fails with
one line for each finding; what no attack could check is never a pass, but `CouldNotCheck`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from keyhole.audit.given import Stored, corpus_file
from keyhole.audit.one_exposure import FLIPS, audit_exposure
from keyhole.audit.stores import StoreTarget
from keyhole.audit.targets import Target, open_target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit, Outcome
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, KeyholeError
from keyhole.data import NO_LABEL, Example, read_texts
from keyhole.models import Loaded, demo
from keyhole.models.loading import is_model, lent
from keyhole.oracle import BudgetExhausted, Oracle, OracleError
from keyhole.testing.lines import UNCHECKED, came_back, line, skipped
from keyhole.testing.record import tell

Texts = str | Path | Sequence[str]
Labelled = Example | str | tuple[str, int]


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
    model: str | Sequence[str] | None = None,
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
        raise InputError(f"expected at_most from 0 to 1, got {at_most}")
    if examples and exposure != FLIPS:
        raise InputError(f"expected examples with {FLIPS}, got {exposure}")
    stored = Stored(model, sample, known, seed, corpus)
    with _opened(target, tokenizer, stored, authorized, endpoint, device) as opened:
        subject = _with_texts(opened, _listed(texts), [_example(each) for each in examples])
        try:
            audit = audit_exposure(
                subject, exposure, precision=precision, share=share, budget=budget, seed=seed
            )
        except (OracleError, BudgetExhausted) as error:
            raise CouldNotCheck(f"{UNCHECKED}: {error}") from error
    tell(audit)
    given = [finding for finding in audit.attacks if came_back(finding) > at_most]
    unchecked = [
        *(line(each) for each in audit.attacks
          if each.outcome is Outcome.UNCHECKED and each not in given),
        *(skipped(skip) for skip in audit.skips if skip.unchecked or not audit.attacks),
    ]  # fmt: skip
    words = [f"{UNCHECKED}: {each}" for each in unchecked]
    if given:
        raise AssertionError("\n".join([*map(line, given), *words]))
    if words or not audit.attacks:
        raise CouldNotCheck("\n".join(words) or f"{UNCHECKED}: no attack reads {exposure}")
    return audit


@contextmanager
def _opened(
    target: Any, tokenizer: Any, stored: Stored, authorized: bool,
    endpoint: EndpointOptions | None, device: str,
) -> Generator[Target]:  # fmt: skip
    """Whatever a test has at hand, as the audit takes it."""
    if is_model(target):
        with lent(target, tokenizer) as loaded:
            yield _model(loaded, stored)
        return
    if tokenizer is not None:
        raise InputError("expected tokenizer with a transformers model, got another target")
    if isinstance(target, str | Path):
        yield open_target(
            str(target), stored=stored, authorized=authorized, endpoint=endpoint, device=device
        )
    elif isinstance(target, Loaded):
        yield _model(target, stored)
    elif isinstance(target, Target | TextTarget | StoreTarget | Mapping) or (
        callable(target) and hasattr(target, "dim")
    ):
        yield target_of(cast("Oracle", target))
    else:
        raise InputError(
            "expected a target of keyhole audit, a model or an oracle (a callable with .dim), got "
            f"{type(target).__name__}"
        )


def _model(loaded: Loaded, stored: Stored) -> Target:
    stored.expect_none(loaded.name, corpus=True)
    corpus = None if stored.corpus is None else corpus_file(stored.corpus)
    return target_of(TextTarget(loaded, demo.TEXTS, corpus=corpus))


def _with_texts(target: Target, texts: Sequence[str] | None, examples: Sequence[Example]) -> Target:
    """The models of a target with a test's own texts instead of those that ship."""
    if texts is None and not examples:
        return target
    if not target.models:
        raise InputError(f"expected texts with a model, got {target.name or 'an endpoint'}")
    given = texts or [example.text for example in examples]
    models = {
        name: replace(model, texts=given, examples=examples, notes=(), about="", twin=None)
        for name, model in target.models.items()
    }
    return replace(target, models=models)


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
