"""Texts from gradients: what a client of federated learning, or of a tuning service, hands over.

`update.py` is what leaks, how a client makes it and how the judge makes it again; `span.py` what a
gradient says of a layer's inputs, and so which tokens may stand where; `texts.py` puts texts
together. `recover_batch.py` goes through all that, and adds classes and last tokens.
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
    "Batch", "BatchRecovery", "Protocol", "Update", "batch_of", "is_update", "load_update",
    "recover_batch", "update_of",
]  # fmt: skip
