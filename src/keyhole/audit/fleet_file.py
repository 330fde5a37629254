"""fleet.toml: the targets of one audit of many, with the options of `keyhole audit` by their names.

    [defaults]
    texts = 2

    [[target]]
    name = "reviews"
    target = "./models/reviews"
    data = "reviews.tsv"

    [[target]]
    target = "./others/*"

What a target says comes before the defaults, and those before the command line. Names of files
begin in the folder of this file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from keyhole.audit.opening import Opening
from keyhole.core.endpoint import headers_of
from keyhole.core.errors import MOST, InputError
from keyhole.core.files import exists, is_file, is_folder, read_text
from keyhole.oracle.connection import without_password
from keyhole.stores import names_store

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
# Options that are fields of an Opening, and those of an endpoint, with their types.
_OPTIONS: dict[str, type] = {
    "column": str, "label": str, "device": str, "flips": int, "seed": int, "authorized": bool,
    "against_defences": bool,
}  # fmt: skip
_FILES = ("known", "corpus", "data", "ledger")
_ENDPOINT: dict[str, tuple[str, type]] = {
    "insecure": ("insecure", bool), "batch": ("batch", int), "rate": ("rate", float),
    "timeout": ("timeout", float), "dim": ("dim", int), "input_tensor": ("input", str),
    "output_tensor": ("output", str), "positive": ("positive", str),
}  # fmt: skip
_SPECIAL = ("texts", "layers", "model", "only", "header", "ca")
_SHARED = (*_OPTIONS, *_FILES[:-1], *_ENDPOINT, *_SPECIAL)
_OWN = ("target", "name", "ledger")  # of one target alone
_PATTERN = re.compile(r"[*?\[]")
_STEM = 80  # letters of a file's name


@dataclass(frozen=True)
class Member:
    """One target of a fleet: its name, the name of its files, and what is opened."""

    name: str
    stem: str
    opening: Opening


def read_fleet(path: str | Path, base: Opening | None = None) -> list[Member]:
    """The targets of a file; `base` holds the options that hold where the file says nothing."""
    base = Opening("") if base is None else base
    text = read_text(path, "a fleet file")
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"expected TOML in {path}, got {error}") from error
    _expect_keys(data, ("defaults", "target"), str(path))
    defaults = data.get("defaults", {})
    entries = data.get("target", [])
    if not isinstance(defaults, dict):
        raise InputError(f"expected [defaults] as a table in {path}, got {defaults!r:.40}")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"expected one [[target]] or more in {path}, got none")
    folder = Path(path).absolute().parent
    base = _with(base, cast("dict[str, Any]", defaults), folder, f"{path}, [defaults]", _SHARED)
    made: list[tuple[str, Opening]] = []
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        made += _entry(base, entry, folder, f"{path}, [[target]] {number}")
    return _named(made, path)


def members_of(targets: Sequence[str], base: Opening) -> list[Member]:
    """Targets by their names alone, as a policy lists them."""
    made = [(without_password(name), replace(base, target=name)) for name in targets]
    return _named(made, "the policy")


def _entry(base: Opening, entry: Any, folder: Path, where: str) -> list[tuple[str, Opening]]:
    """One [[target]], or as many as its pattern matches."""
    if not isinstance(entry, dict):
        raise InputError(f"expected a table in {where}, got {entry!r:.40}")
    given = cast("dict[str, Any]", entry)
    opening = _with(base, given, folder, where, (*_OWN, *_SHARED))
    target = _typed(str, given.get("target", ""), "target", where)
    name = _typed(str, given.get("name", ""), "name", where)
    if not target.strip():
        raise InputError(f"expected target in {where}, got none")
    names = _matching(target, folder, where)
    opening = replace(opening, folder=str(folder))
    return [
        (_name(name, each, several=len(names) > 1), replace(opening, target=each)) for each in names
    ]


def _name(name: str, target: str, *, several: bool) -> str:
    shown = without_password(target).removeprefix("./")
    return f"{name}/{Path(shown).name}" if name and several else name or shown


def _matching(target: str, folder: Path, where: str) -> list[str]:
    """A name as it is, or the targets in a folder that a pattern matches."""
    literal = "://" in target or not _PATTERN.search(target)
    if literal or exists(folder / target):
        return [target]
    pattern = Path(target)
    start = Path(pattern.anchor) if pattern.is_absolute() else folder
    try:
        matches = sorted(start.glob(str(pattern.relative_to(pattern.anchor))))
    except (ValueError, NotImplementedError, OSError) as error:
        raise InputError(f"expected a pattern of names in {where}, got {target}") from error
    names = [
        str(path if pattern.is_absolute() else path.relative_to(folder))
        for path in matches
        if not path.name.startswith(".") and _is_target(path)
    ]
    if not names:
        raise InputError(f"expected targets that match {target} in {where}, got none")
    return names


def _is_target(path: Path) -> bool:
    if is_folder(path):
        return is_file(path / "config.json")
    return path.suffix in (".gguf", ".safetensors") or names_store(str(path))


def _with(
    base: Opening, given: Mapping[str, Any], folder: Path, where: str, keys: tuple[str, ...]
) -> Opening:
    """The options of a table, written over those of `base`."""
    given = {key.replace("-", "_"): value for key, value in given.items()}
    _expect_keys(given, keys, where)
    changes: dict[str, Any] = {}
    endpoint: dict[str, Any] = {}
    for key, value in given.items():
        if key in _OPTIONS:
            changes[key] = _typed(_OPTIONS[key], value, key, where)
        elif key in _FILES:
            changes[key] = str(folder / _typed(str, value, key, where))
        elif key in _ENDPOINT:
            field, kind = _ENDPOINT[key]
            endpoint[field] = _typed(kind, value, key, where)
        elif key == "ca":
            endpoint["ca"] = folder / _typed(str, value, key, where)
        elif key == "header":
            endpoint["headers"] = headers_of(list(_several(str, value, key, where)))
        elif key == "layers":
            changes[key] = "all" if value == "all" else _several(int, value, key, where)
        elif key == "only":
            changes[key] = _several(str, value, key, where)
        elif key == "model":
            models = _several(str, value, key, where)
            changes[key] = tuple(_found(folder, name) for name in models)
        elif key == "texts":
            changes[key] = MOST if value == "all" else _typed(int, value, key, where)
    opening = replace(base, **changes, endpoint=replace(base.endpoint, **endpoint))
    opening.expect_valid()
    return opening


def _found(folder: Path, name: str) -> str:
    """A model in the folder of the file, or a name on the hub, or `demo`."""
    return str(folder / name) if exists(folder / name) else name


def _several(kind: type, value: Any, key: str, where: str) -> tuple[Any, ...]:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return tuple(_typed(kind, each, key, where) for each in values)


def _typed(kind: type, value: Any, key: str, where: str) -> Any:
    whole = kind is float and type(value) is int
    if type(value) is not kind and not whole:
        raise InputError(f"expected {key} as {_WORDS[kind]} in {where}, got {value!r:.40}")
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"expected {key} as text in {where}, got {value!r:.40}")
    return kind(value)


def _expect_keys(given: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, 0.5)
            hint = f": did you mean {near[0]}?" if near else ""
            raise InputError(f"expected {', '.join(sorted(keys))} in {where}, got {key[:40]}{hint}")


def _named(made: list[tuple[str, Opening]], path: str | Path) -> list[Member]:
    """Every target with a name of its own, and a plain one for its files, whatever it is called."""
    members: dict[str, Member] = {}
    stems = {"index"}  # the page of the fleet
    for name, opening in made:
        if name in members:
            raise InputError(
                f"expected each name once in {path}, got {name[:80]} twice: give each a name"
            )
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:_STEM].strip("-").lower() or "target"
        stem, number = plain, 1
        while stem in stems:
            number += 1
            stem = f"{plain}-{number}"
        stems.add(stem)
        members[name] = Member(name, stem, opening)
    return list(members.values())
