"""Read text from keys and values, of a decoder's KV cache or of an encoder.

Keys and values are rows of their positions, as hidden states are. A decoder's are read
left to right, with their rotary positions undone (decoder.py). An encoder's are read
from a linear map back to its embeddings (encoder.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from keyhole.core import not_applicable
from keyhole.recover.attack import Attack, Proposal, Target
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.encoder import EncoderStates
from keyhole.recover.leaks import KeyValues, Leak


@dataclass(frozen=True)
class CachedKeys:
    """Read caches with `decoder` if the model is causal, and with `encoder` otherwise."""

    decoder: Attack = field(default_factory=DecoderStates)
    encoder: Attack = field(default_factory=EncoderStates)

    def __call__(
        self, target: Target, leaks: Sequence[Leak]
    ) -> Iterator[tuple[int, Proposal]]:
        if not all(isinstance(leak, KeyValues) for leak in leaks):
            raise not_applicable("this attack reads keys and values")
        yield from (self.decoder if target.parts.causal else self.encoder)(
            target, leaks
        )
