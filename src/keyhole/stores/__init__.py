"""Vector stores: where sentence embeddings are kept, opened to be read and never written to."""

from keyhole.stores.registry import KINDS, kind_of, open_store
from keyhole.stores.store import Kind, Place, Store

__all__ = ["KINDS", "Kind", "Place", "Store", "kind_of", "open_store"]
