"""Methods by the names they have on the command line."""

from __future__ import annotations

from keyhole.errors import InputError
from keyhole.extract.auto import Auto
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import Method
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.nuclear_norm import NuclearNorm
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.orthogonal_heads import OrthogonalHeads
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.single_head import SingleHead
from keyhole.extract.tolerant import Tolerant

_PLAIN = {
    "auto": Auto,
    "single-head": SingleHead,
    "sign-only": SignOnly,
    "one-layer": OneLayerTransformer,
    "multi-head": MultiHead,
    "orthogonal-heads": OrthogonalHeads,
    "full-output": FullOutput,
}


def named(
    name: str,
    *,
    rank: int | None = None,
    answer_error: float | None = None,
    max_norm: float | None = None,
    seed: int = 0,
) -> Method:
    """The method called `name`; options that it does not have are left aside."""
    match name:
        case "low-rank":
            return LowRank(rank=rank, seed=seed)
        case "nuclear-norm":
            if rank is None:
                raise InputError("expected --rank for nuclear-norm, got none")
            return NuclearNorm(rank=rank, seed=seed)
        case "tolerant":
            if answer_error is None:
                raise InputError("expected --answer-error for tolerant, got none")
            return Tolerant(answer_error, max_norm=max_norm, seed=seed)
        case _:
            return _PLAIN[name](seed=seed)
