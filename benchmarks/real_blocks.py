"""Whole blocks of real checkpoints, extracted by queries that return one token's vector.

    minilm   all-MiniLM-L6-v2, block 3: attention, GELU, biases, LayerNorms after the sums
    mpnet    all-mpnet-base-v2, block 3: the same with position biases in every head (`--encoder
             FOLDER`)
    smollm2  SmolLM2-135M, block 0: RMS norms in front, rotary positions, 9 heads that share keys
             and values in threes, gated units

Everything but attention is extracted first, then the heads one by one, then all heads
are fitted at once. Each matrix is compared with the truth in canonical form. The lower
bound is the number of parameters, less the symmetries, divided by the numbers in an
answer. subjects.py says where the models come from; `--quick` takes planted blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import show
import subjects
from keyhole.core import Unsuccessful
from keyhole.core.errors import KeyholeError
from keyhole.extract import judge
from keyhole.extract.block import REACHES
from keyhole.extract.blocks import post_norm, pre_norm
from keyhole.extract.blocks.view import View, last
from keyhole.extract.canonical import canonical_block, compared
from keyhole.extract.sub_layer_values import LostSum
from keyhole.models.block import block
from keyhole.oracle.block import Block
from keyhole.oracle.protocol import Counted
from keyhole.oracle.sub_layer import SubLayer
from planted import plant_block
from show import Row

TOLERANCE = 1e-6
SUBJECTS = {
    "minilm": ("MiniLM-L6", 3),
    "mpnet": ("all-mpnet-base-v2", 3),
    "smollm2": ("SmolLM2-135M", 0),
}


def run(
    quick: bool,
    subject: Literal["minilm", "mpnet", "smollm2"] = "minilm",
    encoder: Path | None = None,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    layer: int | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    if quick:
        planted = plant_block(
            12, norm="behind", heads=2, head_dim=3, width=10, epsilon=1e-12
        )
        yield from measure("planted, norms behind, d = 12", planted, "cpu", seed)
        planted = plant_block(12, norm="behind", heads=3, head_dim=3, width=8, places=6)
        yield from measure("planted, a bias of positions, d = 12", planted, "cpu", seed)
        planted = plant_block(
            10,
            heads=2,
            head_dim=4,
            groups=1,
            width=5,
            activation="silu",
            gated=True,
            rotary=True,
            biases=False,
        )
        yield from measure("planted, norms in front, d = 10", planted, "cpu", seed)
        return
    name, usual = SUBJECTS[subject]
    layer = usual if layer is None else layer
    opened, where = {"smollm2": (subjects.smollm2, model)}.get(
        subject, (subjects.minilm, encoder)
    )
    target = block(opened(where, "cpu").model, layer)
    yield from measure(f"{name}, block {layer}", target, device, seed)


def measure(label: str, target: Block, device: str, seed: int) -> Iterator[Row]:
    """Extract everything but attention, then the heads one by one, then fit all of them at once."""
    behind = target.norm == "behind"
    stream = torch.Generator().manual_seed(seed)
    counted = Counted(Computed.on(device, target) if behind else target)
    what = f"{label}, all but attention"
    started = time.perf_counter()

    def took() -> str:
        return f"{time.perf_counter() - started:.0f} s"

    try:
        if behind:
            found = post_norm.read(
                partial(last, counted), target.dim, torch.device(device), stream
            )
            errors, units = off_behind(found, canonical_block(target))
        else:
            view = View.open(counted, stream)
            found = pre_norm.read(view, torch.device(device), stream)
            errors, units = off_in_front(view, found, target)
        about = f"{units} of {len(target.A)} units, {took()}"
        yield row(what, errors, counted.queries, target, about)
        what = f"{label}, the whole block"
        attention = heads_of(found, REACHES.get(target.norm, (1.0,) * 3), stream)
        errors = compared(target, found.block(attention))
        rough = row(
            f"{label}, heads one by one", errors, counted.queries, target, took()
        )
        yield replace(rough, target="", met=None)
        made = found.block(found.polished(attention, stream))
        about = f"fresh error {judge(target, made, seed + 100).worst:.1e}, {took()}"
        yield row(what, compared(target, made), counted.queries, target, about)
    except (Unsuccessful, KeyholeError) as end:
        about = f"{counted.queries:,} queries"
        yield Row(what, str(end), f"<= {TOLERANCE:.0e}", False, about)


def heads_of(found: Any, reaches: Sequence[float], stream: torch.Generator) -> SubLayer:
    """Extract the heads with queries of the first length at which it succeeds."""
    end: Exception = LostSum("no length was tried")
    for reach in reaches:
        try:
            return found.attention(stream, reach)
        except (Unsuccessful, LostSum) as error:
            end = error
    raise end


def off_behind(
    found: post_norm.PeeledPostNorm, true: Block
) -> tuple[dict[str, float], int]:
    """Return the error of each part but attention, and the number of units found."""
    units = found.layer.units
    lift = found.axes
    total = torch.einsum("hdk,hkm->dm", true.V, true.O)
    rows = (units.A @ lift.mT, units.a, (lift @ units.C).mT)
    near = torch.cdist(true.A, rows[0]).argmin(1)
    A, a, C = (part[near] for part in rows)
    errors = {
        "E": off(found.second.E, true.E),
        "e": off(found.second.e, true.e),
        "sum of VO": off(found.first.total, total),
        "b": off(found.first.b, true.b),
        "D": off(found.D, true.D),
        "A": off(A, true.A),
        "a": off(a, true.a),
        "C": off(C, true.C.mT),
        "c": off(lift @ found.layer.c, true.c),
    }
    return errors, len(near.unique())


def off_in_front(
    view: View, undone: Any, target: Block
) -> tuple[dict[str, float], int]:
    """Return the same for a block with norms in front."""
    # The heads are not known yet: the true ones stand in, so that the rest can be
    # compared.
    found = canonical_block(undone.block(target.sub_layer))
    true = canonical_block(target)
    near = torch.cdist(true.A, found.A).argmin(1)
    total = torch.einsum(
        "hdk,hkm->dm", true.V.repeat_interleave(len(true.O) // len(true.V), 0), true.O
    )
    pairs = {
        "sum of VO": (view.axes @ undone.M, total, total),
        "b": (undone.b, true.b, total),
        "C": (found.C[:, near], true.C, true.C),
        "c": (found.c, true.c, true.C),
        "A": (found.A[near], true.A, true.A),
        "a": (found.a[near], true.a, true.A),
    }
    if len(true.G):
        pairs["G"] = found.G[near], true.G, true.G
        pairs["g"] = found.g[near], true.g, true.G
    errors = {name: off(*pair) for name, pair in pairs.items()}
    epsilons = (
        (undone.epsilon, target.epsilon),
        (undone.network.epsilon, target.epsilon_behind),
    )
    for name, (ours, theirs) in zip(("ε", "second ε"), epsilons, strict=True):
        errors[name] = abs(ours / theirs - 1)
    return errors, len(near.unique())


@dataclass(frozen=True)
class Computed:
    """A block whose answers are computed on a device."""

    block: Block
    device: str

    @classmethod
    def on(cls, device: str, block: Block) -> Computed:
        parts = {name: part.to(device) for name, part in block.tensors().items()}
        return cls(replace(block, **parts), device)

    @property
    def dim(self) -> int:
        return self.block.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.block.answers(sequences.to(self.device)).to("cpu")


def off(found: Tensor, true: Tensor, scale: Tensor | None = None) -> float:
    """Return the error relative to the largest number of `scale`, for biases their matrix."""
    return float(
        (found - true).abs().max() / (true if scale is None else scale).abs().max()
    )


def row(
    label: str, errors: dict[str, float], queries: int, target: Block, about: str
) -> Row:
    largest = max(errors.values())
    bound = -(-target.unknowns // target.dim)
    item = {"errors": errors, "queries": queries, "bound": bound, "about": about}
    return Row(
        label,
        f"largest relative error of a matrix {largest:.1e}",
        f"<= {TOLERANCE:.0e}",
        largest <= TOLERANCE,
        f"{queries:,} queries, lower bound {bound:,}, {queries / bound:.0f} times; {about}; "
        + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
        items=[item],
    )


if __name__ == "__main__":
    show.main(run)
