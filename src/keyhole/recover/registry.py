"""All attacks on leaked texts by name, and the kinds of leaks that each reads.

To add an attack, write it in its own module and add an entry to ATTACKS. If several
attacks read the same leak, the first is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry
from keyhole.models.anatomy import Anatomy
from keyhole.recover.attack import Attack
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.encoder import EncoderStates, SubLayerOutput
from keyhole.recover.layers.key_values import CachedKeys
from keyhole.recover.layers.maps import EncoderMaps
from keyhole.recover.layers.mixed import MixedKeys
from keyhole.recover.layers.token_search import TokenSearch
from keyhole.recover.layers.unordered import UnorderedPrefixes, UnorderedStates

_MAX_COUNTED = (
    1 << 26
)  # numbers in a token table: an audit runs no larger vocabulary whole
NOISE = "noise of 10%"
NORMALISED = "normalised"
PERMUTED = "permuted"
PRECISIONS = ("float32", "bfloat16", "int8", NOISE, NORMALISED, PERMUTED)


@dataclass(frozen=True)
class Row:
    """A kind of leak, of encoders or of causal models, that an attack reads and the audit tries.

    `layers` returns the layers of a model that the audit tries, each in all
    `precisions`: stored as float32 or with fewer bits, or with what `NOISE`,
    `NORMALISED` and `PERMUTED` say done to it. `settings` are the attack's
    hyperparameters in an audit, if a full search takes too long there. `permuted` is
    true if the tokens of the leak are in no order. `short` is true if the attack reads
    short texts only; an audit then tries some besides its own texts.
    """

    kind: str
    causal: bool
    exposure: Exposure
    remedy: str
    layers: Callable[[Anatomy], Sequence[int | None]]
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8", NOISE)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    permuted: bool = False
    short: bool = False


def spread(parts: Anatomy) -> list[int]:
    """Return all layers of a small model, or the first, the middle and the last of a large one."""
    last = parts.layers
    return list(range(1, last + 1)) if last <= 6 else sorted({1, last // 2, last})


def soon_counted(parts: Anatomy) -> list[None]:
    """Return [None], one check of no layer, if running the vocabulary takes minutes at most.

    embeddings/counts.py runs it.
    """
    return [None] if parts.table.numel() <= _MAX_COUNTED else []


def not_audited(_: Anatomy) -> list[None]:
    """Return no layer: `keyhole recover` reads such leaks, but an audit does not make them."""
    return []


def caches(parts: Anatomy) -> list[int]:
    """Return the first layer and the middle one; causal models' caches are counted from 0."""
    first = 0 if parts.causal else 1
    return sorted({first, first + (parts.layers - 1) // 2})


_KEEP = "Do not return hidden states: rounding, noise or a later layer hardly help."
_CACHE = "Treat a KV cache as the text itself: encrypt it, and never share it between clients."
_MIXED = (
    "A secret mix of rows hides nothing: encrypt the cache, as LMCache does with AES-GCM, with a "
    "key for each client."
)
_MAPS = (
    "Do not return attention maps; for explanations return one number for each token."
)
_INNER = "Keep the outputs of sub-layers inside."
_POOLED = "This is the result of one attack: treat embeddings of secrets as secrets in any case."
_LOGITS = (
    "Return only the few likeliest tokens: as many logits as the model is wide give its "
    "state."
)
_BRIEF = TokenSearch(rounds=4, candidates=8, sweeps=1)

_hidden = partial(
    Row,
    "hidden",
    exposure=Exposure("KH-TEXT-HIDDEN-STATES"),
    remedy=_KEEP,
    layers=spread,
    precisions=("float32", "bfloat16", "int8", NOISE, NORMALISED),
)
_unordered = partial(
    Row,
    "hidden",
    exposure=Exposure("KH-TEXT-HIDDEN-STATES", PERMUTED),
    remedy=_KEEP,
    layers=lambda parts: [-(-parts.layers // 2)],
    precisions=(PERMUTED,),
    permuted=True,
)
_cached = partial(
    Row,
    "kv",
    exposure=Exposure("KH-TEXT-KEYS-AND-VALUES"),
    remedy=_CACHE,
    layers=caches,
)
_inner = partial(
    Row,
    "attention",
    exposure=Exposure("KH-TEXT-ATTENTION-OUTPUT"),
    remedy=_INNER,
    layers=lambda _: [1],
    precisions=("float32",),
)
_logits = Row(
    "logits", True, Exposure("KH-TEXT-LOG-PROBABILITIES"), _LOGITS, not_audited, ()
)

ATTACKS: Registry[Attack, Row] = Registry(
    Entry("encoder-states", EncoderStates, (_hidden(causal=False),)),
    Entry("cached-keys", CachedKeys, (_cached(causal=False), _cached(causal=True))),
    Entry(
        "mixed-keys",
        MixedKeys,
        (
            Row(
                "mixed",
                True,
                Exposure("KH-TEXT-KEYS-AND-VALUES", defences=("mixed",)),
                _MIXED,
                not_audited,
                (),
            ),
        ),
        note="Read text from a KV cache whose tokens are mixed within blocks (KV-Cloak).",
    ),
    Entry(
        "encoder-maps",
        EncoderMaps,
        (
            Row(
                "maps",
                False,
                Exposure("KH-TEXT-ATTENTION-MAPS"),
                _MAPS,
                lambda parts: [1, 2][: parts.layers],
                ("float32",),
                {"deeper": _BRIEF},
            ),
        ),
    ),
    Entry(
        "sublayer-output",
        SubLayerOutput,
        (
            _inner(
                causal=False,
                settings={"search": _BRIEF, "states": EncoderStates(rounds=4)},
            ),
        ),
        note="Read text from the output of an encoder's attention sub-layer, before the residual.",
    ),
    Entry(
        "counted-reader",
        CountedReader,
        (
            Row(
                "pooled",
                False,
                Exposure("KH-TEXT-EMBEDDING"),
                _POOLED,
                soon_counted,
                ("float32",),
                {"search": SumSearch(passes=2_000)},
                short=True,
            ),
            Row(
                "pooled", True, Exposure("KH-TEXT-EMBEDDING"), _POOLED, not_audited, ()
            ),
            _logits,
        ),
    ),
    Entry("decoder-states", DecoderStates, (_hidden(causal=True), _inner(causal=True))),
    Entry(
        "unordered-states",
        UnorderedStates,
        (_unordered(causal=False),),
        note="Read text from an encoder's hidden states in random order.",
    ),
    Entry(
        "unordered-prefixes",
        UnorderedPrefixes,
        (_unordered(causal=True),),
        note="Read text from a causal decoder's hidden states in random order, left to right.",
    ),
)

WITH_CORPUS = "counted-reader"  # the attack that takes --corpus


def readers(
    kind: str,
    causal: bool,
    permuted: bool = False,
) -> list[str]:
    """Return the names of the attacks that read a kind of leak, the default first."""
    names = [
        entry.name
        for entry, row in ATTACKS.rows()
        if (row.kind, row.causal, row.permuted) == (kind, causal, permuted)
    ]
    return list(dict.fromkeys(names))
