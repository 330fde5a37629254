"""The text from what a model exposes, its weights being public: one row for each exposure.

The auditor runs the model on texts, takes what would leak, in float32 and as leaks are in practice,
and hands the attacker the model and the leak: nothing else. Because the auditor knows the texts,
the verdict is about them, and a wrong claim of the judge would show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keyhole.audit.check import Checked, Watch
from keyhole.data import Example
from keyhole.errors import InputError
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.percent import percent
from keyhole.recover import (
    EncoderMaps,
    EncoderStates,
    Mark,
    PooledEmbedding,
    SubLayerOutput,
    TextRecovery,
    TokenSearch,
    recover_texts,
)
from keyhole.recover.attack import Attack
from keyhole.recover.leaks import Leak
from keyhole.recover.pieces import written
from keyhole.recover.recover_text import ATTACKS
from keyhole.recover.simulate import degrade, leak_of
from keyhole.results import Finding, Skip, Status
from keyhole.results.readings import Piece, Reading, Readings

NOISE = "noise of 10%"
PRECISIONS = ("float32", "bfloat16", "int8", NOISE)
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_BRIEF = TokenSearch(rounds=4, candidates=8, sweeps=1)  # where the leak has to be searched
_ONLY = ("float32",)


@dataclass(frozen=True)
class Leaking:
    """One kind of exposure: how people call it, in which layers and precisions it is tried.

    `searched` says how long to look where there is no short way to the text.
    """

    kind: str
    words: str
    remedy: str
    layers: Callable[[Anatomy], Sequence[int | None]]
    precisions: tuple[str, ...] = PRECISIONS
    searched: Attack | None = None


def _some(parts: Anatomy) -> list[int]:
    """All layers of a small model; of a large one the first, the middle and the last."""
    last = parts.layers
    return list(range(1, last + 1)) if last <= 6 else sorted({1, last // 2, last})


def _caches(parts: Anatomy) -> list[int]:
    first = 0 if parts.causal else 1
    return sorted({first, first + (parts.layers - 1) // 2})


_KEEP = "Do not return hidden states: rounding and noise hardly help, a later layer neither."
_CACHE = "Treat a KV cache as the text itself: encrypt it, and never share it between clients."
_MAPS = "Do not return attention maps; for explanations return one number for each token."
_INNER = "Keep the outputs of sub-layers inside."
_POOLED = "What is measured here is one attack: treat embeddings of secrets as secret all the same."

EXPOSURES = (
    Leaking("hidden", "hidden states", _KEEP, _some),
    Leaking("kv", "keys and values", _CACHE, _caches),
    Leaking("maps", "attention maps", _MAPS, lambda parts: [1, 2][: parts.layers], _ONLY,
            EncoderMaps(deeper=_BRIEF)),
    Leaking("attention", "attention output before the residual", _INNER, lambda _: [1], _ONLY,
            SubLayerOutput(_BRIEF, EncoderStates(rounds=4))),
    Leaking("pooled", "pooled embedding", _POOLED, lambda _: [None], _ONLY,
            PooledEmbedding(TokenSearch(rounds=2, passes=40, candidates=4, sweeps=1))),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TextTarget:
    """A model and the texts to try it with; `layers` overrides which ones are looked at.

    `examples` are what a classifier's predictions are flipped on, by default the texts; `about`
    says how they were chosen, where that matters; `twin` is the same model hardened, to be shown
    beside it.
    """

    loaded: Loaded
    texts: Sequence[str]
    layers: Sequence[int] | None = None
    precisions: Sequence[str] = field(default=PRECISIONS)
    examples: Sequence[Example] = ()
    twin: Loaded | None = None
    about: str = ""

    def __post_init__(self) -> None:
        if not self.texts:
            raise InputError("expected one text or more, got none")
        unknown = [name for name in self.precisions if name not in PRECISIONS]
        if unknown or not self.precisions:
            raise InputError(f"expected precisions among {', '.join(PRECISIONS)}, got {unknown}")


def check(surface: str, target: TextTarget, seed: int, watch: Watch | None) -> Checked:
    """Every exposure of a model from which text may be read."""
    try:
        parts = anatomy(target.loaded.model)
    except InputError as error:  # a family whose parts are not known here
        return Checked(skips=(Skip("the text", "none", str(error)),))
    findings: list[Finding] = []
    skips: list[Skip] = []
    for one in EXPOSURES:
        if (one.kind, parts.causal) not in ATTACKS:
            kind = "causal model" if parts.causal else "encoder"
            skips.append(Skip(one.words, "none", f"no attack here reads it of a {kind}"))
            continue
        layers = one.layers(parts)
        if target.layers is not None and one.kind in ("hidden", "kv"):
            layers = list(target.layers)
        for layer in layers:
            findings.append(_run(one, layer, surface, target, seed, watch))
    return Checked(tuple(findings), tuple(skips))


def _run(
    one: Leaking,
    layer: int | None,
    surface: str,
    target: TextTarget,
    seed: int,
    watch: Watch | None,
) -> Finding:
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    exposure = Exposure(one.kind, layer or 0)
    words = one.words if layer is None else f"{one.words} of layer {layer}"
    started = time.perf_counter()
    exact = [leak_of(model, tokenizer, text, exposure) for text in target.texts]
    method = None if _direct(one.kind, layer) else one.searched
    cells: list[Readings] = []
    first: list[TextRecovery] = []
    for precision in [name for name in one.precisions if name in target.precisions]:

        def notify(done: int, total: int, precision: str = precision) -> None:
            if watch is not None:
                watch(f"{words}, {precision}", done, total)

        leaks = [_as(leak, precision, seed + number) for number, leak in enumerate(exact)]
        found = recover_texts(model, tokenizer, leaks, method=method, watch=notify)
        first = first or found
        readings = tuple(
            _reading(tokenizer, text, one) for text, one in zip(target.texts, found, strict=True)
        )
        above = anatomy(model).layers if layer is None else layer  # pooling is done at the top
        cells.append(Readings(one.kind, above, precision, readings))
    status, reason = _verdict(cells)
    return Finding(
        surface=surface,
        exposure=words,
        attack=first[0].method if first else "",
        status=status,
        reason=reason,
        remedy=one.remedy,
        error=None,
        queries=len(target.texts),
        seconds=time.perf_counter() - started,
        known=cells[0].known if cells else 0.0,
        sought="text",
        texts=tuple(cells),
    )


def _direct(kind: str, layer: int | None) -> bool:
    """Maps of the first layer are read in closed form: no search has to be cut short."""
    return kind == "maps" and layer == 1


def _as(leak: Leak, precision: str, seed: int) -> Leak:
    if precision == NOISE:
        return replace(degrade(leak, noise=0.1, seed=seed), precision=None)
    return degrade(leak, precision)


def _reading(tokenizer: Any, text: str, found: TextRecovery) -> Reading:
    truth = list(tokenizer(text, truncation=True, max_length=512)["input_ids"])
    special = set(tokenizer.all_special_ids)
    if len(found.ids) != len(truth):  # the attack ended without a proposal
        pieces = tuple(Piece("?", Mark.UNKNOWN.value, False) for id_ in truth if id_ not in special)
        return Reading(text, pieces, False, False)
    pieces_of = written(tokenizer, found.ids)
    pieces = tuple(
        # A special token where a word was: it is not written, but it was read.
        Piece(piece or f" {tokenizer.convert_ids_to_tokens(id_)}", mark.value, id_ == true)
        for piece, mark, id_, true in zip(pieces_of, found.marks, found.ids, truth, strict=True)
        if true not in special
    )
    return Reading(text, pieces, found.ids == truth, found.verified)


def _verdict(cells: list[Readings]) -> tuple[Status, str]:
    """By the leak as it is; the other precisions are told beside it."""
    if not cells:
        return Status.NOT_APPLICABLE, "none of the precisions asked for is tried here"
    count = len(cells[0].readings)
    exact, known = cells[0].exact, cells[0].known
    told = [f"{cell.precision} {percent(cell.known)}" for cell in cells]
    reason = f"{exact} of {count} texts exact and verified; tokens right: {', '.join(told)}"
    if exact == count:
        return Status.RECOVERED, reason
    if exact or known >= _PARTLY:
        return Status.INEXACT, reason
    return Status.UNSOLVED, reason
