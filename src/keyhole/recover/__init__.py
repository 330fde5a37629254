"""Recover text from what a model leaks: attacks propose, judges verify (extra `models`)."""

from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.encoder import EncoderStates, SubLayerOutput
from keyhole.recover.layers.key_values import CachedKeys
from keyhole.recover.layers.maps import EncoderMaps
from keyhole.recover.layers.token_search import TokenSearch
from keyhole.recover.leaks import (
    AttentionMaps,
    AttentionOutput,
    HiddenStates,
    KeyValues,
    Leak,
    Logits,
    MixedCache,
    Pooled,
    load_leak,
)
from keyhole.recover.recovery import Mark, TextRecovery
from keyhole.recover.run import LeakRead, recover_text, run
from keyhole.recover.simulate import capture, degrade, leak_of
from keyhole.recover.texts import recover_texts, recovering

__all__ = [
    "AttentionMaps",
    "AttentionOutput",
    "CachedKeys",
    "DecoderStates",
    "EncoderMaps",
    "EncoderStates",
    "HiddenStates",
    "KeyValues",
    "Leak",
    "LeakRead",
    "Logits",
    "Mark",
    "MixedCache",
    "Pooled",
    "SubLayerOutput",
    "TextRecovery",
    "TokenSearch",
    "capture",
    "degrade",
    "leak_of",
    "load_leak",
    "recover_text",
    "recover_texts",
    "recovering",
    "run",
]
