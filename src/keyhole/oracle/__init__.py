"""What the attacker may ask: the protocol, planted targets, and wrappers around any oracle."""

from keyhole.core.endpoint import EndpointOptions
from keyhole.oracle.counted import Counted
from keyhole.oracle.degraded import Clipped, Degradation, Failing, Noisy, Rounded, SignOnly
from keyhole.oracle.http import Limits, Refused
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.planted import Attention, Head, MultiHead, OneLayer, ReluFfn
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError, ask, identity_of
from keyhole.oracle.rationed import Rationed, TooFast
from keyhole.oracle.refusing import LengthLimited, UsualOnly
from keyhole.oracle.storage import KINDS, Planted, load, load_plain, plant, save
from keyhole.oracle.sub_layer import SubLayer
from keyhole.oracle.subspaces import plant_orthogonal
from keyhole.oracle.vector_prompts import VectorPrompts

__all__ = [
    "KINDS",
    "Attention",
    "BudgetExhausted",
    "Clipped",
    "Counted",
    "Degradation",
    "EndpointOptions",
    "Failing",
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
    "Rationed",
    "Refused",
    "ReluFfn",
    "Rounded",
    "SignOnly",
    "SubLayer",
    "TooFast",
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
