"""An inversion problem: weights and an output, and no field for the true input.

*Unmasking Transformers* (arXiv 2310.12462), Definition 1.2: given `W`, `V` and `B`,
find `X` with

    softmax(X W Xᵀ) X V = B        minimising ‖softmax(X W Xᵀ) X V − B‖_F² + γ‖X‖_F²

Blocks of real models also have several heads, biases, a residual connection and a
causal mask, and an attacker may know some entries of `X`, or `B` only within a
tolerance. Each is one field of `Problem`. The output projection is multiplied into `V`.

The biases of a real block reduce to two vectors. With `q = W_Qᵀx + b_Q` and `k = W_Kᵀx
+ b_K` the scores are `x_iᵀWx_j + (W_K b_Q)ᵀx_j` plus terms that are equal for all keys.
Softmax ignores equal terms, so `key_bias = W_K b_Q`. Rows of the attention map sum to
1, so the biases of the values and of the projection add one constant vector,
`output_bias`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.core.files import read_tensors, write_tensors
from keyhole.core.float64 import random_stream
from keyhole.core.machine import expect_memory

_TENSORS = ("W", "V", "B", "key_bias", "output_bias", "known", "maps")
_NUMBERS = ("tolerance", "gamma")
_FLAGS = ("causal", "residual")


@dataclass(frozen=True, eq=False)
class Problem:
    """Find `X` (n×d) from the weights and the output `B` (n×m) of an attention layer.

    `W` is d×d and `V` d×m, or H×d×d and H×d×m for H heads. `known` (n×d) holds the
    entries of `X` that the attacker knows, and NaN for the others. `maps` (n×n, or
    H×n×n) are the attention maps if they leaked too. `B` is exact within ±`tolerance`.
    `gamma` is the paper's regulariser.
    """

    W: Tensor
    V: Tensor
    B: Tensor
    key_bias: Tensor | None = None
    output_bias: Tensor | None = None
    known: Tensor | None = None
    maps: Tensor | None = None
    causal: bool = False
    residual: bool = False
    tolerance: float = 0.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, _as_float64(name, tensor))
        W = self.W
        V = self.V
        B = self.B
        if W.ndim not in (2, 3) or W.shape[-1] != W.shape[-2]:
            raise InputError(f"W must be d×d, or H×d×d for H heads: it is {_shape(W)}")
        if V.ndim != W.ndim or V.shape[:-1] != W.shape[:-1]:
            rows = "×".join(map(str, W.shape[:-1]))
            raise InputError(
                f"V must be {rows}×m, as W is {_shape(W)}: it is {_shape(V)}"
            )
        if B.ndim != 2 or B.shape[1] != V.shape[-1]:
            raise InputError(
                f"B must be n×{V.shape[-1]}, as V is {_shape(V)}: it is {_shape(B)}"
            )
        if self.residual and self.outputs != self.dim:
            raise InputError(
                "a residual connection needs as many outputs as inputs: "
                f"d = {self.dim}, m = {self.outputs}"
            )
        n = self.length
        heads = self.heads
        shapes = {
            "key_bias": [W.shape[:-1]],
            "output_bias": [V.shape[-1:]],
            "known": [(n, self.dim)],
            "maps": [(heads, n, n)] if heads > 1 else [(1, n, n), (n, n)],
        }
        for name, allowed in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape not in allowed:
                expected = "×".join(map(str, allowed[-1]))
                raise InputError(
                    f"expected {name} of shape {expected}, got {_shape(tensor)}"
                )
        for name in _NUMBERS:
            expect_number(name, getattr(self, name), least=0)

    @property
    def length(self) -> int:
        """n, the number of tokens."""
        return self.B.shape[0]

    @property
    def dim(self) -> int:
        return self.W.shape[-1]

    @property
    def outputs(self) -> int:
        return self.V.shape[-1]

    @property
    def heads(self) -> int:
        return 1 if self.W.ndim == 2 else self.W.shape[0]

    @property
    def unknown(self) -> Tensor:
        """True for each entry of X that is not known: (n, d)."""
        if self.known is None:
            return self.B.new_ones(self.length, self.dim).bool()
        return self.known.isnan()

    @property
    def unbiased(self) -> Tensor:
        """B without the output bias."""
        return self.B if self.output_bias is None else self.B - self.output_bias

    def output(self, X: Tensor) -> Tensor:
        """The layer's output for an input (…, n, d)."""
        result = attention.output(
            X, self.W, self.V, causal=self.causal, key_bias=self.key_bias
        )
        if self.output_bias is not None:
            result = result + self.output_bias
        return result + X if self.residual else result

    def maps_of(self, X: Tensor) -> Tensor:
        """The attention maps of an input: (…, n, n), or (…, H, n, n)."""
        scores = attention.scores(X, X, self.W, key_bias=self.key_bias)
        return attention.probabilities(scores, causal=self.causal)

    @property
    def fault(self) -> str | None:
        """Why no method can run, or None: a tensor of the problem holds NaN or infinity."""
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            wrong = tensor.isinf() if name == "known" else ~tensor.isfinite()
            if wrong.any():
                return f"{name} holds {int(wrong.sum())} NaN or infinite numbers"
        return None

    def save(self, path: str | Path) -> None:
        """Write the problem as a .safetensors file."""
        tensors = {
            n: getattr(self, n) for n in _TENSORS if getattr(self, n) is not None
        }
        metadata = {n: str(getattr(self, n)) for n in (*_FLAGS, *_NUMBERS)}
        write_tensors(path, tensors, {"keyhole": "1", "kind": "inversion", **metadata})

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read a problem from any .safetensors file with tensors W, V and B."""
        metadata, tensors = read_tensors(path)
        missing = [name for name in ("W", "V", "B") if name not in tensors]
        if missing:
            got = ", ".join(sorted(tensors)) or "nothing"
            raise InputError(f"{path} must hold tensors W, V and B: it holds {got}")
        given: dict[str, Any] = {
            name: tensors[name] for name in _TENSORS if name in tensors
        }
        given |= {name: metadata.get(name, "False") == "True" for name in _FLAGS}
        given |= {name: _number(metadata, name, path) for name in _NUMBERS}
        try:
            problem = cls(**given)
        except InputError as error:
            raise InputError(f"{error} in {path}") from error
        if problem.fault:
            raise InputError(f"{problem.fault} in {path}")
        return problem


def _number(
    metadata: dict[str, str],
    name: str,
    path: str | Path,
) -> float:
    """Return a number from a file's metadata, 0 if it is missing."""
    word = metadata.get(name, "0")
    try:
        return float(word)
    except ValueError:
        raise InputError(
            f"expected {name} as a number in {path}, got {word!r}"
        ) from None


def _as_float64(name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to float64. NaN and infinity pass: they become a status (`fault`)."""
    # Callers without a type checker may pass anything.
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"expected {name} as a torch.Tensor, got {type(tensor).__name__}"
        )
    if tensor.is_complex():
        raise InputError(f"expected real numbers in {name}, got {tensor.dtype}")
    tensor = tensor.detach().double()
    if 0 in tensor.shape:
        raise InputError(f"{name} is empty: its shape is {_shape(tensor)}")
    return tensor


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def plant(
    length: int = 8,
    dim: int = 8,
    *,
    scale: float = 0.3,
    symmetric: bool = False,
    heads: int = 1,
    value_scale: float = 1.0,
    residual: bool = False,
    causal: bool = False,
    biases: bool = False,
    seed: int = 0,
) -> tuple[Problem, Tensor]:
    """Return a random problem and its true input.

    X is standard Gaussian, and the entries of W have variance scale²/d. With
    `symmetric`, `W = scale·MMᵀ` where the entries of M have variance 1/d. The entries
    of V have standard deviation `value_scale` (about 1/√d in real blocks).
    """
    for name, size in {"tokens": length, "dim": dim, "heads": heads}.items():
        expect_count(name, size)
    expect_number("scale", scale, least=0)
    expect_seed(seed)
    # X, W, V and M, and the scores and maps that the output is computed from.
    numbers = 4 * length * dim + 4 * heads * dim * dim + 3 * heads * length * length
    expect_memory(8 * numbers, f"{length:,} tokens of d = {dim:,} with {heads:,} heads")
    stream = random_stream(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    several = (heads,) if heads > 1 else ()
    X = normal(length, dim)
    V = value_scale * normal(*several, dim, dim)
    M = normal(*several, dim, dim) / math.sqrt(dim)
    blank = Problem(
        W=scale * (M @ M.mT if symmetric else M),
        V=V,
        B=X,
        key_bias=normal(*several, dim) / math.sqrt(dim) if biases else None,
        output_bias=normal(dim) if biases else None,
        residual=residual,
        causal=causal,
    )
    problem = replace(blank, B=blank.output(X))
    if problem.fault:
        raise InputError(f"{problem.fault}: try a smaller scale than {scale:g}")
    return problem, X
