"""Oracles, which answer an attacker's questions: planted targets, endpoints and wrappers."""

from keyhole.core.endpoint import EndpointOptions
from keyhole.defence import Defence
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.defences import (
    Clipped,
    Defended,
    Noisy,
    Rounded,
    SignOnly,
    defended,
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
    "Defence",
    "Defended",
    "EndpointOptions",
    "Head",
    "Ledger",
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
    "VectorPrompts",
    "ask",
    "defended",
    "identity_of",
    "load",
    "load_plain",
    "plant",
    "plant_orthogonal",
    "save",
]
