"""A stack of layers as a file: `1.W`, `1.V`, `2.W`, … and the output `B` of the last.

Flags are metadata under the same numbers (`1.causal`, `1.residual`), as `Problem` has them without;
`tolerance` is that of B. Biases are optional: `1.key_bias`, `1.output_bias`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import read_tensors, write_tensors
from keyhole.invert.structure.layers import Layer, Layers

_TENSORS = ("W", "V", "key_bias", "output_bias")
_FLAGS = ("causal", "residual")


def save_layers(stack: Layers, path: str | Path) -> None:
    """Write a stack as .safetensors, to be handed to another machine."""
    tensors: dict[str, Tensor] = {"B": stack.B}
    metadata = {"keyhole": "1", "kind": "layers", "tolerance": str(stack.tolerance)}
    for number, layer in enumerate(stack.layers, 1):
        for name in _TENSORS:
            if (tensor := getattr(layer, name)) is not None:
                tensors[f"{number}.{name}"] = tensor.clone()  # layers may share weights
        metadata |= {f"{number}.{name}": str(getattr(layer, name)) for name in _FLAGS}
    write_tensors(path, tensors, metadata)


def load_layers(path: str | Path) -> Layers:
    """Read a stack; any .safetensors with tensors 1.W, 1.V, 2.W, … and B is one."""
    metadata, tensors = read_tensors(path)
    depth = 0
    while f"{depth + 1}.W" in tensors:
        depth += 1
    wanted = ["B", "1.W", *(f"{number}.V" for number in range(1, max(depth, 1) + 1))]
    known = {"B", *(f"{n}.{name}" for n in range(1, depth + 1) for name in _TENSORS)}
    if not set(wanted) <= set(tensors) or not set(tensors) <= known:
        got = ", ".join(sorted(tensors)[:9]) or "nothing"
        raise InputError(f"expected tensors 1.W, 1.V, 2.W, … and B in {path}, got {got}")
    word = metadata.get("tolerance", "0")
    try:
        tolerance = float(word)
    except ValueError:
        raise InputError(f"expected tolerance as a number in {path}, got {word!r}") from None
    try:
        layers = tuple(_layer(number, metadata, tensors) for number in range(1, depth + 1))
        stack = Layers(layers, tensors["B"], tolerance)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    if stack.fault:
        raise InputError(f"{stack.fault} in {path}")
    return stack


def _layer(number: int, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Layer:
    given: dict[str, Any] = {
        name: tensors[f"{number}.{name}"].double()
        for name in _TENSORS
        if f"{number}.{name}" in tensors and _real(f"{number}.{name}", tensors)
    }
    given |= {name: metadata.get(f"{number}.{name}", "False") == "True" for name in _FLAGS}
    return Layer(**given)


def _real(name: str, tensors: dict[str, Tensor]) -> bool:
    tensor = tensors[name]
    if tensor.is_complex():
        raise InputError(f"expected real numbers in {name}, got {tensor.dtype}")
    if tensor.ndim < 1 or 0 in tensor.shape:
        raise InputError(f"expected {name} with at least one entry, got {tuple(tensor.shape)}")
    return True
