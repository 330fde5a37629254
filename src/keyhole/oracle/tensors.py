"""What a server states of its model's tensors, and which of them are asked and read.

The server is not trusted: what it states is checked before it is used, and a statement that makes
no sense is refused in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.bodies import shown
from keyhole.oracle.protocol import OracleError

FLOATS = {
    "FP64": torch.float64, "FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
TEXTS, IDS = ("BYTES",), ("INT64", "INT32", "UINT64", "UINT32")
_LONGEST_NAME = 1000
_NEGATIVE = frozenset({"0", "-1", "no", "n", "false", "negative", "neg", "label_0"})
_POSITIVE = frozenset({"1", "+1", "yes", "y", "true", "positive", "pos", "label_1"})


@dataclass(frozen=True)
class Stated:
    """A tensor as the server describes it; sizes of −1 are free."""

    name: str = "sequences"
    datatype: str = "FP64"
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int | None:
        return self.shape[-1] if self.shape and self.shape[-1] > 0 else None

    @property
    def length(self) -> int | None:
        """The one length of sequences that it takes, where it takes one alone."""
        return self.shape[1] if len(self.shape) == 3 and self.shape[1] > 0 else None

    @property
    def masks(self) -> bool:
        """Does it say which tokens count? All of them do here."""
        return "mask" in self.name.lower() and len(self.shape) == 2

    def filled(self, values: Tensor) -> dict[str, Any]:
        """The tensor as a request has it."""
        return {
            "name": self.name,
            "shape": list(values.shape),
            "datatype": self.datatype,
            "data": values.reshape(-1).tolist(),
        }


class TakesTexts(InputError):
    """An endpoint that takes texts or numbers of tokens, where vectors are asked."""

    def __init__(self, tensor: Stated, url: str) -> None:
        self.what = "texts" if tensor.datatype in TEXTS else "numbers of tokens"
        super().__init__(
            f"expected an endpoint that takes vectors in {', '.join(FLOATS)}, got {url}, whose "
            f"input {tensor.name!r} takes {self.what} ({tensor.datatype}): keyhole audit tells "
            "what its answers expose"
        )


def stated(metadata: dict[str, Any], kind: str, url: str) -> list[Stated]:
    """The inputs or outputs of a model; none where the server does not tell."""
    listed = metadata.get(kind) or []
    items = objects(listed)
    if items is None:
        raise OracleError(f"expected a list of {kind} from {url}, got {described(listed)}")
    return [_stated(item, kind.removesuffix("s"), url) for item in items]


def _stated(item: dict[str, Any], kind: str, url: str) -> Stated:
    name, shape = item.get("name", Stated.name), item.get("shape", [])
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise OracleError(f"expected the name of an {kind} from {url}, got {described(name)}")
    sizes = sizes_of(shape)
    if sizes is None:
        raise OracleError(f"expected the shape of an {kind} from {url}, got {described(shape)}")
    datatype = item.get("datatype", Stated.datatype)
    known = isinstance(datatype, str) and len(datatype) <= 10 and datatype.isalnum()
    if not known:
        raise OracleError(
            f"expected the datatype of an {kind} from {url}, got {described(datatype)}"
        )
    return Stated(name, datatype.upper(), tuple(sizes))


def chosen_input(inputs: Sequence[Stated], name: str | None, url: str) -> Stated:
    """The tensor that takes vectors: the one of that name, or the only one there is."""
    if name is not None and inputs:
        inputs = [named(inputs, name, url)]
    if not inputs:
        return Stated() if name is None else Stated(name)
    vectors = [tensor for tensor in inputs if tensor.datatype in FLOATS and not tensor.masks]
    if not vectors:
        for tensor in inputs:
            if tensor.datatype in (*TEXTS, *IDS) and not tensor.masks:
                raise TakesTexts(tensor, url)
        kinds = ", ".join(f"{tensor.name} ({tensor.datatype})" for tensor in inputs[:5])
        raise InputError(
            f"expected an input of vectors in {', '.join(FLOATS)} at {url}, got {shown(kinds, 200)}"
        )
    several = [tensor for tensor in vectors if len(tensor.shape) == 3] or vectors
    if len(several) > 1:
        names = ", ".join(tensor.name for tensor in several[:5])
        raise InputError(
            f"expected one input of vectors at {url}, got {shown(names, 200)}: give "
            "--endpoint input=NAME"
        )
    return several[0]


def named(tensors: Sequence[Stated], name: str, url: str) -> Stated:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    names = ", ".join(tensor.name for tensor in tensors[:5])
    raise InputError(f"expected a tensor of {url} ({shown(names, 200)}), got {shown(name)}")


def most_at_once(metadata: dict[str, Any], tensor: Stated) -> int | None:
    """The most sequences that the server states to take in one request."""
    parameters = metadata.get("parameters")
    about = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
    limits = [about.get("max_batch_size"), metadata.get("max_batch_size")]
    if len(tensor.shape) == 3:
        limits.append(tensor.shape[0])
    whole = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(whole, default=None)


def signs(labels: Sequence[object], positive: str | None, url: str) -> list[float]:
    """Words as signs: 1 where a label is the positive one, else 0."""
    if positive is not None:
        return [float(label == positive) for label in labels]
    answers: list[float] = []
    for label in labels:
        word = str(label).strip().lower()
        if word not in _NEGATIVE | _POSITIVE:
            raise OracleError(
                f"expected numbers, or labels such as no and yes, from {url}, got "
                f"{shown(repr(label), 60)}: give --endpoint positive=LABEL, the one that "
                "counts as 1, or --endpoint output=NAME of one with numbers"
            )
        answers.append(float(word in _POSITIVE))
    return answers


def objects(items: object) -> list[dict[str, Any]] | None:
    """A list of objects; None where it is anything else."""
    if not isinstance(items, list):
        return None
    listed = cast("list[object]", items)
    inside = [cast("dict[str, Any]", item) for item in listed if isinstance(item, dict)]
    return inside if len(inside) == len(listed) else None


def sizes_of(shape: object) -> list[int] | None:
    if not isinstance(shape, list):
        return None
    sizes = cast("list[object]", shape)
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    return whole if len(whole) == len(sizes) and min(whole, default=0) >= -1 else None


def numbers(data: object, count: int) -> Tensor | None:
    """The numbers of a list, flat or nested, if there are `count`."""
    if not isinstance(data, list):
        return None
    items = cast("list[object]", data)
    if len(items) != count and not (items and isinstance(items[0], list)):
        return None
    try:
        values = torch.tensor(items, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return values.reshape(-1) if values.numel() == count else None


def words(data: object, count: int) -> list[str] | None:
    """The strings of a list, if there are `count` and all are strings."""
    items = cast("list[object]", data) if isinstance(data, list) else []
    strings = [item for item in items if isinstance(item, str)]
    return strings if len(strings) == len(items) == count else None


def described(value: object) -> str:
    """What stands in a server's answer, in a few words however large or deep it is."""
    if isinstance(value, dict):
        keys = list(cast("dict[str, Any]", value))
        return f"an object with {shown(', '.join(keys[:5])) or 'no keys'}"
    if isinstance(value, list):
        items = cast("list[object]", value)
        short = len(items) <= 5 and all(isinstance(item, int | float) for item in items)
        return shown(items) if short else f"a list of {len(items):,}"
    return shown(repr(value[:80] if isinstance(value, str) else value))
