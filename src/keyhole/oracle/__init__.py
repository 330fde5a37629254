"""Oracles, which answer an attacker's questions: planted targets, endpoints and wrappers."""

from keyhole.core.endpoint import EndpointOptions
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.defences import (
    Clipped,
    Degradation,
    LengthLimited,
    Noisy,
    Rounded,
    SignOnly,
    UsualOnly,
)
from keyhole.oracle.http import Limits, Refused
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.planted import (
    Attention,
    AttentionLayers,
    Head,
    MultiHead,
    OneLayer,
    ReluFfn,
)
from keyhole.oracle.protocol import (
    BudgetExhausted,
    Counted,
    Oracle,
    OracleError,
    ask,
    identity_of,
)
from keyhole.oracle.storage import (
    KINDS,
    Planted,
    load,
    load_plain,
    plant,
    plant_orthogonal,
    save,
)
from keyhole.oracle.sub_layer import SubLayer
from keyhole.oracle.vector_prompts import VectorPrompts

__all__ = [
    "KINDS",
    "Attention",
    "AttentionLayers",
    "Block",
    "Blocks",
    "BudgetExhausted",
    "Clipped",
    "Counted",
    "Degradation",
    "EndpointOptions",
    "Head",
    "Ledger",
    "LengthLimited",
    "Limits",
    "MultiHead",
    "Noisy",
    "OneLayer",
    "OpenInference",
    "Oracle",
    "OracleError",
    "Planted",
    "Refused",
    "ReluFfn",
    "Rounded",
    "SignOnly",
    "SubLayer",
    "UsualOnly",
    "VectorPrompts",
    "ask",
    "identity_of",
    "load",
    "load_plain",
    "plant",
    "plant_orthogonal",
    "save",
]
