"""Files of `torch.save`, read without running any of the code that a pickle may ask for.

torch's weights-only loading knows tensors, lists and dictionaries. Caches and outputs of
transformers are objects of its classes: they are read as plain objects that have their attributes
and do nothing, so no code of any library runs either.
"""

from __future__ import annotations

import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from keyhole.core.errors import InputError
from keyhole.core.files import trouble

_CLASSES = re.compile(r"transformers\.(cache_utils\.\w*(Cache|Layer)|[\w.]*modeling_outputs\.\w+)")


class Plain:
    """An object with the attributes that the file gives it, and no methods."""


def plain_output(*_: Any) -> OrderedDict[str, Any]:
    """In place of an output of a model: its fields are arguments, and then set one by one."""
    return OrderedDict()


def read_pickled(path: str | Path) -> Any:
    """What torch.save wrote, or one line on what in it is no data."""
    what = "tensors saved with torch.save"
    try:
        asked: list[str] = []
        if zipfile.is_zipfile(path):  # what torch wrote before version 1.6 is no archive
            asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # whatever a broken pickle provokes
        raise _broken(what, path, error) from error
    refused = [name for name in asked if not _CLASSES.fullmatch(name)]
    if refused:
        raise InputError(
            f"expected {what}, got {path} with {refused[0]}, which would run code: save a "
            "dictionary of tensors instead (of a TransformerLens cache, cache.cache_dict)"
        )
    known: list[Any] = [(plain_output if "outputs" in name else Plain, name) for name in asked]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _broken(what, path, error) from error


def _broken(what: str, path: str | Path, error: Exception) -> Exception:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return trouble(what, path, error if isinstance(error, OSError) else ValueError(first))
