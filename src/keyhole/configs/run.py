"""`keyhole check-config` as one function: files and folders in, findings out; nothing is run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from keyhole.configs.finding import Checked, Finding, Unread
from keyhole.configs.registry import RULES, kind_of
from keyhole.configs.source import Unreadable
from keyhole.core.errors import InputError

_ASIDE = {
    ".git",
    ".hg",
    ".svn",
    "node_modules",
    ".venv",
    "venv",
    "__pycache__",
    ".tox",
    ".mypy_cache",
}
MOST = 100_000  # files of a folder


def check(paths: Sequence[str | Path], ignore: Iterable[str] = ()) -> Checked:
    """Look at files, and at all files of a known kind in folders; links in folders stay unfollowed.

    `ignore` are rules that are not reported.
    """
    ignored = set(ignore)
    if unknown := sorted(ignored - set(RULES)):
        raise InputError(f"expected rules among {', '.join(RULES)}, got {unknown[0][:80]}")
    if not paths:
        raise InputError("expected files or folders to look at, got none")
    findings, unread, looked = list[Finding](), list[Unread](), 0
    for path, named in _files([Path(path) for path in paths], unread):
        kind = kind_of(path)
        if kind is None:
            if named:
                unread.append(Unread(str(path), "expected a configuration of a known kind"))
            continue
        looked += 1
        try:
            hits = {(hit.line, hit.rule.id, hit.what): hit for hit in kind.look(path)}
        except Unreadable as error:
            unread.append(Unread(str(path), str(error)))
            continue
        findings += [
            Finding(hit.rule, str(path), hit.line, hit.what)
            for _, hit in sorted(hits.items())
            if hit.rule.id not in ignored
        ]
    return Checked(tuple(findings), tuple(unread), looked, tuple(sorted(ignored)))


def _files(paths: list[Path], unread: list[Unread]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was named; what is named must be there."""
    seen = set[str]()
    for path in paths:
        try:
            folder, plain = path.is_dir(), path.is_file()
        except (OSError, ValueError) as error:
            raise InputError(f"expected a file or a folder, got {_shown(path)}: {error}") from error
        if not folder and not plain:
            reason = "it is a device or a pipe" if _exists(path) else "there is no such file"
            raise InputError(f"expected a file or a folder, got {_shown(path)}: {reason}")
        for file in _inside(path, unread) if folder else [path]:
            if str(file) not in seen:
                seen.add(str(file))
                yield file, not folder


def _inside(folder: Path, unread: list[Unread]) -> Iterator[Path]:
    count = 0

    def refused(error: OSError) -> None:
        unread.append(Unread(str(error.filename), error.strerror or str(error)))

    for place, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if name not in _ASIDE)
        for name in sorted(names):
            path = Path(place, name)
            count += 1
            if count > MOST:
                unread.append(Unread(str(folder), f"expected at most {MOST:,} files, got more"))
                return
            if kind_of(path) is not None and path.is_file() and not path.is_symlink():
                yield path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _shown(path: Path) -> str:
    return str(path).encode("utf-8", "replace").decode()
