"""Reading and writing of whole files, with errors that say in one line what is wrong.

Every file is written under another name first and then renamed, so that nobody ever
finds half a file, not even after a crash. Only the owner may read it (mode 0600),
because it holds what a target gave away. Devices and pipes are written to directly and
never replaced.

Only plain files are read: a device may have no end, and a pipe no writer.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from keyhole.core.errors import InputError, KeyholeError, first_line
from keyhole.core.machine import expect_memory

if TYPE_CHECKING:
    from torch import Tensor

SLOT_MAGIC = b"qsgg"  # the first bytes of a slot that llama.cpp saved

# Errors that are the machine's fault; all others are taken for a wrong name from the
# caller.
_FAULTS_OF_THE_MACHINE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)
_MEMORY_PER_BYTE = 8  # approximate bytes of memory to read and parse one byte of text


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file or leave the old one."""
    # "replace", because UTF-8 cannot encode half of a surrogate pair.
    _write_whole(path, lambda partial: partial.write_text(text, "utf-8", "replace"))


def write_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a whole .safetensors file or leave the old one."""
    from safetensors.torch import save_file

    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    _write_whole(path, lambda partial: save_file(plain, partial, metadata=metadata))


def exists(path: str | Path, *, links: bool = False) -> bool:
    """Return whether anything has this name; with `links`, a broken symbolic link counts.

    Unlike `Path.exists`, it accepts names that no file can have.
    """
    return _mode(path, follow=not links) != 0


def is_folder(path: str | Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def is_file(path: str | Path) -> bool:
    return stat.S_ISREG(_mode(path))


def _mode(path: str | Path, follow: bool = True) -> int:
    """Return the mode that stat gives, or 0 if there is nothing of this name."""
    try:
        return Path(path).stat(follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return 0


def expect_file(path: str | Path, what: str) -> None:
    """Raise unless this is a plain file; `what` says what the reader expected in it."""
    mode = _mode(path)
    if stat.S_ISREG(mode):
        return
    reason = "there is no such file"
    if stat.S_ISDIR(mode):
        reason = "it is a folder"
    elif mode:
        reason = "it is a device or a pipe"
    raise InputError(f"cannot read {path} as {what}: {reason}")


def expect_writable(path: Path) -> None:
    """Raise, before hours of work, if no file can be written at this path."""
    reason = ""
    if not is_folder(path.absolute().parent):
        reason = "there is no such folder"
    elif is_folder(path):
        reason = "it is a folder"
    elif stat.S_ISFIFO(_mode(path)):
        reason = "it is a pipe"
    if reason:
        raise InputError(f"cannot write {path}: {reason}")
    expect_possible(path)


def expect_possible(path: Path) -> None:
    """Raise if no file can have this name."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a plain file in UTF-8, without the mark that Excel puts in front."""
    expect_file(path, what)
    try:
        expect_memory(_MEMORY_PER_BYTE * Path(path).stat().st_size, f"the file {path}")
        return Path(path).read_text("utf-8-sig")
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
    """Return the metadata and tensors of a .safetensors file; `what` says what was expected."""
    expect_file(path, what)
    expect_memory(Path(path).stat().st_size, f"the file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        raise unreadable(what, path, error) from error


def unreadable(
    what: str,
    path: str | Path,
    error: BaseException,
) -> KeyholeError:
    return _failure(f"cannot read {path} as {what}", error)


@contextmanager
def reading(
    what: str, path: str | Path, *errors: type[BaseException]
) -> Generator[None]:
    """Turn errors of these types into the one sentence of `unreadable`."""
    try:
        yield
    except errors as error:
        raise unreadable(what, path, error) from error


def unwritable(path: str | Path, error: BaseException) -> KeyholeError:
    return _failure(f"cannot write {path}", error)


def _failure(message: str, error: BaseException) -> KeyholeError:
    """Return an InputError for a wrong name, a KeyholeError for a full disk and the like."""
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or first_line(error)
    if number is None:  # safetensors, a Rust program, has the number in its message
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found:
            number = int(found[1])
    kind = KeyholeError if number in _FAULTS_OF_THE_MACHINE else InputError
    return kind(f"{message}: {why}")


def private(path: Path) -> None:
    """Create the file if there is none, and let only its owner read it."""
    if _is_special(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)


def _is_special(path: Path) -> bool:
    """Return whether this is a device, a pipe or a socket."""
    mode = _mode(path)
    return mode != 0 and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    path = Path(path)
    try:
        if _is_special(path):
            return _write_through(path, write)
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


def _write_through(path: Path, write: Callable[[Path], object]) -> None:
    """Write into a device, or into a pipe; a pipe without a reader is an error, not a wait."""
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    with os.fdopen(opened, "wb") as file, TemporaryDirectory() as folder:
        write(content := Path(folder) / "content")
        file.write(content.read_bytes())


def _remove_abandoned(path: Path) -> None:
    """Remove partial files of this path that killed processes left."""
    import psutil  # on demand: it loads slowly

    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        number = partial.name.removeprefix(f"{path.name}.").removesuffix(".partial")
        if (
            number.isdecimal()
            and len(number) < 10
            and not psutil.pid_exists(int(number))
        ):
            partial.unlink(missing_ok=True)


def parse(text: str) -> Any:
    """Parse strict JSON from an untrusted file, or raise a ValueError that says what is wrong.

    Python's own parser accepts NaN, infinity and repeated keys, and deep nesting makes
    it raise a RecursionError.
    """
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys
        )
    except RecursionError:
        raise ValueError("nesting without end") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON without repeated keys: parsers differ in which one they take."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in data if names.count(name) > 1)
        raise ValueError(f"a key twice in one object: {twice[:40]!r}")
    return data
