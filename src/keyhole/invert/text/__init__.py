"""Text from what real models expose: one module per exposure. Needs the extra `models`."""

from keyhole.invert.text.decoder import DecoderStates
from keyhole.invert.text.encoder import EncoderStates
from keyhole.invert.text.key_values import CachedKeys
from keyhole.invert.text.maps import EncoderMaps
from keyhole.invert.text.pooled import PooledEmbedding
from keyhole.invert.text.recover import recover_text, recover_texts, recovering
from keyhole.invert.text.recovery import Mark, TextRecovery
from keyhole.invert.text.sublayer import SubLayerOutput
from keyhole.invert.text.token_search import TokenSearch

__all__ = [
    "CachedKeys", "DecoderStates", "EncoderMaps", "EncoderStates", "Mark", "PooledEmbedding",
    "SubLayerOutput", "TextRecovery", "TokenSearch", "recover_text", "recover_texts", "recovering",
]  # fmt: skip
