"""Hugging Face models: loading them, and reading what they expose. Needs the extra `models`."""

from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.models.loading import Loaded, identity, load_model
from keyhole.models.masking import Site, Sites, Untouched, rewriting

__all__ = [
    "Anatomy",
    "Exposure",
    "Loaded",
    "Site",
    "Sites",
    "Untouched",
    "anatomy",
    "capture",
    "identity",
    "load_model",
    "rewriting",
]
