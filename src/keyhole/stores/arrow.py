"""Vectors in columns of Apache Arrow: lists of floating-point numbers, all of one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.stores.store import library


def vector_columns(schema: Any) -> list[str]:
    """The names of the columns that may hold vectors."""
    types = library("pyarrow").types

    def holds(kind: Any) -> bool:
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return any(is_list(kind) for is_list in lists) and types.is_floating(kind.value_type)

    return [field.name for field in schema if holds(field.type)]


def string_columns(schema: Any) -> list[str]:
    types = library("pyarrow").types
    return [
        field.name
        for field in schema
        if types.is_string(field.type) or types.is_large_string(field.type)
    ]


def matrix(column: Any, where: str) -> Tensor:
    """A column of lists as (rows, numbers)."""
    compute = library("pyarrow.compute")
    if column.null_count or not len(column):
        raise InputError(f"expected a vector in every row of {where}, got a row without one")
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    numbers = compute.list_flatten(column)
    if len(lengths) != 1 or numbers.null_count:
        raise InputError(
            f"expected vectors of one length in {where}, got {lengths[:5]} numbers in them"
        )
    flat = np.array(numbers.to_numpy())
    return torch.from_numpy(flat).reshape(len(column), lengths[0])
