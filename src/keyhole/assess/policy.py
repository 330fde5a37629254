"""What a team has decided: what to audit, what fails, what is ignored and until when.

A policy is a file `keyhole.toml`, or the table `[tool.keyhole]` of a `pyproject.toml`:

    targets = ["./model"]                      # what `keyhole audit` without TARGET audits
    data = "texts.tsv"
    exposures = ["text", "KH-WEIGHTS-*"]       # families or rules to check; all by default
    fail-on = ["high", "text.exact > 0.1"]     # conditions.py; by default all that is given away
    allow-unchecked = false                    # true: what could not be checked does not count

    [severity]
    KH-PREDICTIONS-CUTS = "low"                # a rule's or a finding's severity, set outright

    [[ignore]]
    finding = "KH-TEXT-KEYS-AND-VALUES"        # an id of a finding or rule; * stands for anything
    reason = "the cache never leaves the cluster"
    until = 2027-06-30

    [environment.production]                   # with --environment production
    fail-on = ["low"]

What an environment says replaces what stands above it, but for its ignores and severities, which
are added. Names of files are relative to the policy's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from keyhole.assess.conditions import Condition, condition
from keyhole.assess.item import Ignore
from keyhole.assess.severity import Severity
from keyhole.core import Finding
from keyhole.core.errors import InputError
from keyhole.core.exposure import Rule, expect_exposures
from keyhole.core.files import exists, read_text

FILES = ("keyhole.toml", "pyproject.toml")
_USUAL = ("low",)  # everything that is given away


@dataclass(frozen=True)
class Policy:
    """What is audited and what fails; without a file, everything that is given away does."""

    source: str = "no policy: whatever is given away fails"
    targets: tuple[str, ...] = ()
    data: str | None = None
    exposures: tuple[str, ...] = ()
    fail_on: tuple[Condition, ...] = field(
        default_factory=lambda: tuple(condition(words) for words in _USUAL)
    )
    allow_unchecked: bool = False
    severities: Mapping[str, Severity] = field(default_factory=dict[str, Severity])
    ignores: tuple[Ignore, ...] = ()

    def severity(self, name: str, rule: Rule, finding: Finding) -> Severity | None:  # noqa: ARG002
        """The severity that the policy gives a finding: by its id first, then by its rule."""
        for key in (name, rule.id):
            for pattern, severity in self.severities.items():
                if fnmatchcase(key, pattern):
                    return severity
        return None


def find_policy(folder: Path) -> Path | None:
    """The policy of a folder, if it has one; a pyproject.toml without [tool.keyhole] is none."""
    for name in FILES:
        path = folder / name
        if exists(path) and (name == FILES[0] or "keyhole" in _tool(_parsed(path))):
            return path
    return None


def read_policy(path: str | Path, environment: str | None = None) -> Policy:
    """The policy in a file, as it is in an environment."""
    path = Path(path)
    table = _parsed(path)
    if path.name == FILES[1]:
        if "keyhole" not in _tool(table):
            raise InputError(f"expected a table [tool.keyhole] in {path}, got none")
        table = _table(_tool(table)["keyhole"], "tool.keyhole", path)
    if not table:
        raise InputError(f"expected {', '.join(_KEYS)} or environment in {path}, got nothing")
    environments = _table(table.pop("environment", {}), "environment", path)
    policy = _layer(Policy(source=str(path)), table, path)
    for name, inner in environments.items():  # all of them are read: a mistake is told at once
        layered = _layer(policy, _table(inner, f"environment.{name}", path), path)
        if name == environment:
            policy = replace(layered, source=f"{path}, environment {name}")
    if environment is not None and environment not in environments:
        known = ", ".join(environments) or "none"
        raise InputError(f"expected an environment of {path} ({known}), got {environment[:40]}")
    return policy


def _parsed(path: Path) -> dict[str, Any]:
    text = read_text(path, "a policy")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"expected a policy in TOML, got {path}: {error}") from error


def _tool(table: Mapping[str, Any]) -> dict[str, Any]:
    tool = table.get("tool", {})
    return cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}


def _layer(policy: Policy, table: Mapping[str, Any], path: Path) -> Policy:
    """A policy with what a table adds to it or replaces."""
    for key in table:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise InputError(
                f"expected {', '.join(_KEYS)} or environment in {path}, got {key[:40]}{hint}"
            )
    changes: dict[str, Any] = {}
    for key, value in table.items():
        changes |= _KEYS[key](policy, value, path)
    return replace(policy, **changes)


def _targets(policy: Policy, value: Any, path: Path) -> dict[str, Any]:  # noqa: ARG001
    return {"targets": tuple(_beside(path, name) for name in _words(value, "targets", path))}


def _data(policy: Policy, value: Any, path: Path) -> dict[str, Any]:  # noqa: ARG001
    if not isinstance(value, str):
        raise InputError(f"expected data in {path} as a file's name, got {value!r:.40}")
    return {"data": _beside(path, value)}


def _exposures(policy: Policy, value: Any, path: Path) -> dict[str, Any]:  # noqa: ARG001
    names = _words(value, "exposures", path)
    return {"exposures": expect_exposures(names, f"exposures of {path}")}


def _fail_on(policy: Policy, value: Any, path: Path) -> dict[str, Any]:  # noqa: ARG001
    return {"fail_on": tuple(condition(words) for words in _words(value, "fail-on", path))}


def _allow_unchecked(policy: Policy, value: Any, path: Path) -> dict[str, Any]:  # noqa: ARG001
    if not isinstance(value, bool):
        raise InputError(f"expected allow-unchecked in {path} as true or false, got {value!r:.40}")
    return {"allow_unchecked": value}


def _severities(policy: Policy, value: Any, path: Path) -> dict[str, Any]:
    given: dict[str, Severity] = {}
    for name, word in _table(value, "severity", path).items():
        if word not in list(Severity) or word == Severity.UNKNOWN:
            names = ", ".join(severity for severity in Severity if severity != Severity.UNKNOWN)
            raise InputError(
                f"expected the severity of {name[:60]} in {path} as one of {names}, got "
                f"{word!r:.40}"
            )
        given[name] = Severity(word)
    return {
        "severities": {**given, **{k: v for k, v in policy.severities.items() if k not in given}}
    }


def _ignores(policy: Policy, value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, list):
        raise InputError(f"expected [[ignore]] in {path}, got {value!r:.40}")
    return {"ignores": (*policy.ignores, *(_ignore(one, path) for one in cast("list[Any]", value)))}


def _ignore(value: Any, path: Path) -> Ignore:
    table = _table(value, "ignore", path)
    if set(table) != {"finding", "reason", "until"}:
        raise InputError(
            f"expected finding, reason and until in [[ignore]] of {path}, got "
            f"{', '.join(table)[:60] or 'nothing'}"
        )
    finding, reason, until = table["finding"], table["reason"], table["until"]
    if not isinstance(finding, str) or not isinstance(reason, str) or not reason.strip():
        raise InputError(f"expected a finding and a reason in words in [[ignore]] of {path}")
    if isinstance(until, datetime) or not isinstance(until, date):
        raise InputError(
            f"expected until in [[ignore]] of {path} as a date such as 2027-06-30, got "
            f"{until!r:.40}"
        )
    return Ignore(finding, reason, until)


_KEYS = {
    "targets": _targets,
    "data": _data,
    "exposures": _exposures,
    "fail-on": _fail_on,
    "allow-unchecked": _allow_unchecked,
    "severity": _severities,
    "ignore": _ignores,
}


def _words(value: Any, key: str, path: Path) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
        raise InputError(f"expected {key} in {path} as a list of words, got {value!r:.40}")
    return tuple(cast("list[str]", entries))


def _table(value: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"expected {key} in {path} as a table, got {value!r:.40}")
    return dict(cast("dict[str, Any]", value))


def _beside(path: Path, name: str) -> str:
    """A file or folder by its place beside the policy; addresses and other names as they are."""
    beside = path.parent / name
    return str(beside) if exists(beside) else name
