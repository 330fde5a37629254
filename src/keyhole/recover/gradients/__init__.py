"""Texts from gradients: what a client of federated learning, or of a tuning service, hands over.

`update.py` makes an update as a client does, and judges a batch by making its update
again. `span.py` finds which tokens may stand where, `text_search.py` forms texts of
them, and `recover_batch.py` puts these steps together and adds classes and last tokens.
"""

from keyhole.recover.gradients.recover_batch import BatchRecovery, recover_batch
from keyhole.recover.gradients.update import (
    Batch,
    Protocol,
    Update,
    batch_of,
    is_update,
    load_update,
    update_of,
)

__all__ = [
    "Batch",
    "BatchRecovery",
    "Protocol",
    "Update",
    "batch_of",
    "is_update",
    "load_update",
    "recover_batch",
    "update_of",
]
