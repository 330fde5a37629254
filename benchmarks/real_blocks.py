"""Whole blocks of real checkpoints, taken by queries that return one token's vector.

all-MiniLM-L6-v2, block 3: attention, GELU, biases, LayerNorms behind the sums. First everything but
attention, then its heads one by one, then all of them fitted at once; each matrix next to the
truth, in the form that can be known. The lower bound is what symmetries leave of the parameters,
over the numbers in an answer. subjects.py says where the models come from; `--quick` takes a
planted block.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.core import Unsuccessful
from keyhole.core.errors import KeyholeError
from keyhole.extract import judge
from keyhole.extract.block import REACHES
from keyhole.extract.blocks.behind import Behind, read
from keyhole.extract.blocks.canonical import canonical_block, compared
from keyhole.extract.blocks.view import last
from keyhole.extract.sub_layer import read_attention
from keyhole.extract.sub_layer_values import LostSum
from keyhole.models.block import block
from keyhole.oracle.block import Block, plant_block
from keyhole.oracle.protocol import Counted
from keyhole.oracle.sub_layer import SubLayer
from show import Row

TOLERANCE = 1e-6


def run(
    quick: bool, encoder: Path | None = None, device: str = subjects.DEVICE, layer: int = 3,
    seed: int = 0,
) -> Iterator[Row]:  # fmt: skip
    if quick:
        planted = plant_block(12, norm="behind", heads=2, head_dim=3, width=10, epsilon=1e-12)
        yield from measure("planted, norms behind, d = 12", planted, "cpu", seed)
        return
    loaded = subjects.minilm(encoder, "cpu")
    yield from measure(f"MiniLM-L6, block {layer}", block(loaded.model, layer), device, seed)


def measure(label: str, target: Block, device: str, seed: int) -> Iterator[Row]:
    counted, stream = Counted(target), torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    what = f"{label}, all but attention"
    try:
        found = read(partial(last, counted), target.dim, torch.device(device), stream)
        yield but_attention(what, found, counted.queries, target, time.perf_counter() - started)
        what = f"{label}, the whole block"
        attention = heads_of(found, stream)
        rough = row(
            f"{label}, heads one by one", compared(target, found.block(attention)),
            counted.queries, target, f"{time.perf_counter() - started:.0f} s",
        )  # fmt: skip
        yield replace(rough, target="", met=None)
        made = found.block(found.polished(attention, stream))
    except (Unsuccessful, KeyholeError) as end:
        yield Row(what, str(end), f"<= {TOLERANCE:.0e}", False, f"{counted.queries:,} queries")
        return
    about = f"fresh error {judge(target, made, seed + 100).worst:.1e}"
    about += f", {time.perf_counter() - started:.0f} s"
    yield row(what, compared(target, made), counted.queries, target, about)


def heads_of(found: Behind, stream: torch.Generator) -> SubLayer:
    """From questions of the first lengths at which they come back."""
    end: Exception = LostSum("no length was tried")
    for reach in REACHES["behind"]:
        started = time.perf_counter()
        try:
            return read_attention(found.surroundings(), stream, found.total, reach)
        except (Unsuccessful, LostSum) as error:
            end = error
            seconds = time.perf_counter() - started
            print(f"heads, reach {reach:g}, {seconds:.0f} s: {error}", file=sys.stderr, flush=True)
    raise end


def but_attention(what: str, found: Behind, queries: int, target: Block, seconds: float) -> Row:
    true, units, lift = canonical_block(target), found.layer.units, found.axes
    total = torch.einsum("hdk,hkm->dm", true.V, true.O)
    rows = (units.A @ lift.mT, units.a, (lift @ units.C).mT)
    near = torch.cdist(true.A, rows[0]).argmin(1)
    A, a, C = (part[near] for part in rows)
    errors = {
        "E": off(found.second.E, true.E), "e": off(found.second.e, true.e),
        "sum of VO": off(found.first.total, total), "b": off(found.first.b, true.b),
        "D": off(found.D, true.D), "A": off(A, true.A), "a": off(a, true.a),
        "C": off(C, true.C.mT), "c": off(lift @ found.layer.c, true.c),
    }  # fmt: skip
    units_of = f"{len(near.unique())} of {len(true.A)} units, {seconds:.0f} s"
    return row(what, errors, queries, target, units_of)


def off(found: Tensor, true: Tensor) -> float:
    return float((found - true).abs().max() / true.abs().max())


def row(label: str, errors: dict[str, float], queries: int, target: Block, about: str) -> Row:
    largest, bound = max(errors.values()), -(-target.unknowns // target.dim)
    made = Row(
        label, f"largest relative error of a matrix {largest:.1e}", f"<= {TOLERANCE:.0e}",
        largest <= TOLERANCE,
        f"{queries:,} queries, lower bound {bound:,}, {queries / bound:.0f} times; {about}; "
        + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
    )  # fmt: skip
    return show.itemised(made, [{"errors": errors, "queries": queries, "bound": bound,
                                 "about": about}])  # fmt: skip


if __name__ == "__main__":
    show.main(run)
