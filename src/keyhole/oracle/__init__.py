"""What the attacker may ask: the protocol, planted targets, and wrappers around any oracle."""

from keyhole.oracle.counted import Counted
from keyhole.oracle.degraded import Clipped, Degradation, Failing, Noisy, Rounded, SignOnly
from keyhole.oracle.http import Limits
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.planted import Attention, Head, MultiHead, OneLayer, ReluFfn
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError, ask, identity_of
from keyhole.oracle.storage import KINDS, Planted, load, load_plain, plant, save
from keyhole.oracle.sub_layer import SubLayer
from keyhole.oracle.subspaces import plant_orthogonal

__all__ = [
    "KINDS",
    "Attention",
    "BudgetExhausted",
    "Clipped",
    "Counted",
    "Degradation",
    "Failing",
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
    "ReluFfn",
    "Rounded",
    "SignOnly",
    "SubLayer",
    "ask",
    "identity_of",
    "load",
    "load_plain",
    "plant",
    "plant_orthogonal",
    "save",
]
