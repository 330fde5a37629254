"""Files that are whole or not there, and the one line that says why one cannot be read or written.

Everything is written under another name first and then renamed: whoever reads, or comes back after
a crash, never finds half a file. What Keyhole writes is what a target gave away, so only its owner
may read it (mode 0600).
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from keyhole.errors import InputError


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file or leave the old one."""
    _whole(path, lambda partial: partial.write_text(text, "utf-8"))


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a whole .safetensors file or leave the old one."""
    plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = None if metadata is None else dict(metadata)
    _whole(path, lambda partial: save_file(plain, partial, metadata=about))


def read_tensors(
    path: str | Path, what: str = "a .safetensors file"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a .safetensors file; `what` is what the reader expected."""
    if not Path(path).is_file():
        raise InputError(f"expected {what}, got {path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        raise InputError(f"expected {what}, got {path}: {error}") from error


def private(path: Path) -> None:
    """Make sure that there is a file which only its owner may read."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)


def _whole(path: str | Path, write: Callable[[Path], object]) -> None:
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _remove_abandoned(path)
        private(partial)
        write(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or error
        raise InputError(f"expected a file to write, got {path}: {why}") from error


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
