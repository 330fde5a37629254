"""Text from what a model leaks: one attack per exposure, one judge. Needs the extra `models`."""

from keyhole.recover.attacks.decoder import DecoderStates
from keyhole.recover.attacks.encoder import EncoderStates
from keyhole.recover.attacks.key_values import CachedKeys
from keyhole.recover.attacks.maps import EncoderMaps
from keyhole.recover.attacks.sublayer import SubLayerOutput
from keyhole.recover.embeddings.pooled import PooledEmbedding
from keyhole.recover.leaks import (
    AttentionMaps,
    AttentionOutput,
    HiddenStates,
    KeyValues,
    Leak,
    Logits,
    Pooled,
    load_leak,
    save_leak,
)
from keyhole.recover.recover_text import recover_text, recover_texts, recovering
from keyhole.recover.recovery import Mark, TextRecovery
from keyhole.recover.run import LeakRead, capture, capturing, recovering_files, run
from keyhole.recover.search.token_search import TokenSearch
from keyhole.recover.simulate import degrade, leak_of

__all__ = [
    "AttentionMaps", "AttentionOutput", "CachedKeys", "DecoderStates", "EncoderMaps",
    "EncoderStates", "HiddenStates", "KeyValues", "Leak", "LeakRead", "Logits", "Mark", "Pooled",
    "PooledEmbedding", "SubLayerOutput", "TextRecovery", "TokenSearch", "capture", "capturing",
    "degrade", "leak_of", "load_leak", "recover_text", "recover_texts", "recovering",
    "recovering_files", "run", "save_leak",
]  # fmt: skip
