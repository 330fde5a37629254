"""Files that are whole or not there, and the one line that says why one cannot be read or written.

Everything is written under another name first and then renamed: whoever reads, or comes back after
a crash, never finds half a file. What Keyhole writes is what a target gave away, so only its owner
may read it (mode 0600). Devices and pipes are written to as they are: nothing takes their place.

Only plain files are read: a device has no end, and a pipe may have nobody at its other end.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from keyhole.core.errors import InputError, KeyholeError, first_line
from keyhole.core.machine import expect_memory

if TYPE_CHECKING:
    from torch import Tensor

SLOT_MAGIC = b"qsgg"  # the first bytes of a slot that llama.cpp saved


# What the machine is at fault for; everything else is a wrong name.
_MACHINE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip
_TEXT = 8  # bytes of memory for a byte of text that is read and taken apart, about


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file or leave the old one."""
    # "replace": half a surrogate pair is no text.
    _whole(
        path,
        lambda partial: partial.write_text(text, "utf-8", "replace"),
        lambda: text.encode("utf-8", "replace"),
    )


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a whole .safetensors file or leave the old one."""
    from safetensors.torch import save, save_file

    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = None if metadata is None else dict(metadata)
    _whole(
        path,
        lambda partial: save_file(plain, partial, metadata=about),
        lambda: save(plain, metadata=about),
    )


def exists(path: str | Path, *, links: bool = False) -> bool:
    """Is there something, be it a link to nothing? Takes names that no file can have, as Path's
    own does not."""
    return _mode(path, follow=not links) != 0


def is_folder(path: str | Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _mode(path: str | Path, follow: bool = True) -> int:
    """What stat says of the kind of thing; 0 where there is none."""
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return 0


def expect_file(path: str | Path, what: str) -> None:
    """Refuse what is no plain file; `what` is what the reader expected."""
    mode = _mode(path)
    if stat.S_ISREG(mode):
        return
    reason = "it is a device or a pipe" if mode else "there is no such file"
    if stat.S_ISDIR(mode):
        reason = "it is a folder"
    raise InputError(f"cannot read {path} as {what}: {reason}")


def expect_writable(path: Path) -> None:
    """Refuse, before hours of work, a place where no file can be written."""
    reason = ""
    if not is_folder(path.absolute().parent):
        reason = "there is no such folder"
    elif is_folder(path):
        reason = "it is a folder"
    elif stat.S_ISFIFO(_mode(path)):
        reason = "it is a pipe"
    if reason:
        raise InputError(f"cannot write {path}: {reason}")
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def read_text(path: str | Path, what: str) -> str:
    """The text of a plain file in UTF-8."""
    expect_file(path, what)
    try:
        expect_memory(_TEXT * Path(path).stat().st_size, f"the file {path}")
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(what, path, error) from error


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    text = read_text(path, what)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error


def read_tensors(
    path: str | Path, what: str = "a .safetensors file"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a .safetensors file; `what` is what the reader expected."""
    expect_file(path, what)
    expect_memory(Path(path).stat().st_size, f"the file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        raise unreadable(what, path, error) from error


def unreadable(what: str, path: str | Path, error: BaseException) -> KeyholeError:
    return _failure(f"cannot read {path} as {what}", error)


def unwritable(path: str | Path, error: BaseException) -> KeyholeError:
    return _failure(f"cannot write {path}", error)


def _failure(message: str, error: BaseException) -> KeyholeError:
    """A wrong name is the caller's fault (InputError), a full disk is not."""
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or first_line(error)
    if number is None:  # safetensors is written in Rust, and tells the number in words
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else None
    kind = KeyholeError if number in _MACHINE else InputError
    return kind(f"{message}: {why}")


def private(path: Path) -> None:
    """Make sure that there is a file which only its owner may read."""
    if _special(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)


def _special(path: Path) -> bool:
    """A device, a pipe or a socket: neither a file, nor a folder, nor nothing."""
    mode = _mode(path)
    return mode != 0 and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _whole(path: str | Path, write: Callable[[Path], object], content: Callable[[], bytes]) -> None:
    path = Path(path)
    try:
        if _special(path):
            return _through(path, content())
        _remove_abandoned(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            private(partial)
            write(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise unwritable(path, error) from error


def _through(path: Path, content: bytes) -> None:
    """Into a device, or a pipe that somebody reads: one that nobody does is not waited for."""
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    with os.fdopen(opened, "wb") as file:
        file.write(content)


def _remove_abandoned(path: Path) -> None:
    """What processes that were killed had begun to write there."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        number = partial.name.removeprefix(f"{path.name}.").removesuffix(".partial")
        if number.isdecimal() and not _is_alive(int(number)):
            partial.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":  # where os.kill would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's process, or no process number at all
        return True
    return True


# JSON from anybody's file: what Python's parser lets pass, or dies of, is a ValueError here.
#
# NaN and infinity are no JSON, an object that holds a key twice means nobody knows what, and
# nesting has an end.


def parse(text: str) -> Any:
    """What `text` says, or a ValueError that says what is wrong with it."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nesting without end") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in data if names.count(name) > 1)
        raise ValueError(f"{twice[:40]!r} twice in one object")
    return data
