"""A short prompt from its next-token logits, by the weights alone: no corpus, no learning (ours).

Logits give the last state (final_state.py), and no other prompt gives the same. One token is looked
up: all of them are run alone. Of a longer prompt the last token shows best in the state, whatever
stands before it, so all tokens are run behind a common one and the nearest are gone on with, by
cosines of whitened states (whitening.py). From there prompts grow to the left: a token is put in
front, then each place in turn is tried with the tokens that the model itself finds likeliest
between its neighbours (bigrams.py) and with those that the gradient points at. A prompt of n tokens
costs about n · kept · tokens · sweeps passes, so this ends at a few tokens; longer ones take a
reader learnt from a corpus (embedding_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from keyhole.bounds import expect_count
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.bigrams import Bigrams
from keyhole.recover.embedding.scoring import Encoder, Texts
from keyhole.recover.final_state import vectors_of
from keyhole.recover.leaks import Leak, Logits
from keyhole.results import Status, Unsuccessful

_ON_CPU = 1024  # tokens that are tried at a place
_UPHILL = 4  # of the tokens at a place, one in so many is the gradient's


@dataclass(frozen=True)
class ShortPrompt:
    """Look for prompts of up to `longest` tokens, special ones left out.

    `kept` texts of each length are gone on with, and so many `tokens` are tried at each place of
    each of them (None: 1,024, or on a GPU all there are), in so many `sweeps` over the places.
    `arrived` is 1 − cosine.
    """

    longest: int = 3
    kept: int = 4
    tokens: int | None = None
    sweeps: int = 2
    arrived: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("longest", "kept", "tokens", "sweeps"):
            expect_count(name, getattr(self, name))

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        logits = [cast("Logits", leak) for leak in leaks]
        vectors, exposure = vectors_of(
            target.model, [replace(leak, values=leak.values[:1]) for leak in logits]
        )
        encoder = Encoder(target, exposure)
        frame = len(encoder.before + encoder.after)
        lengths = [None if leak.tokens is None else leak.tokens - frame for leak in logits]
        if all(length is not None and length > self.longest for length in lengths):
            raise self._too_long()
        tables = _Tables(encoder)
        preparing = encoder.passes
        goals = encoder.directions(vectors.to(encoder.device))
        for number, length in enumerate(lengths):
            if length is not None and length > self.longest:
                continue
            before = encoder.passes
            text, cosine = self._search(tables, goals[number], length)
            ids = [*encoder.before, *text, *encoder.after]
            spent = encoder.passes - before
            yield number, Proposal(ids, spent, spent, preparing // len(leaks), loss=1 - cosine)
        if any(length is not None and length > self.longest for length in lengths):
            raise self._too_long()

    def _too_long(self) -> Unsuccessful:
        reason = f"longer than the {self.longest} tokens that are searched without --corpus"
        return Unsuccessful(Status.NOT_APPLICABLE, reason)

    def _search(self, tables: _Tables, goal: Tensor, length: int | None) -> tuple[list[int], float]:
        """The best text of one length, or of all up to the longest, and its cosine."""
        alone, token = (tables.alone @ goal).max(0)
        best = (float(alone), [int(token)])
        texts = tables.last_tokens(goal, self.kept)
        for n in range(2, (length or self.longest) + 1):
            if length is None and best[0] > 1 - self.arrived:
                break
            texts = texts if n == 2 else _grown(texts, tables.common)
            texts, cosine = self._swept(tables, texts, goal)
            own = (cosine, texts.tokens(0))
            best = own if n == length else max(best, own)
        return best[1], best[0]

    def _swept(self, tables: _Tables, texts: Texts, goal: Tensor) -> tuple[Texts, float]:
        """Texts of one length after every place was tried, the best first, and its cosine."""
        cosine = -2.0
        for _ in range(self.sweeps):
            for place in range(texts.ids.shape[1]):
                tokens = tables.worth_trying(texts, place, goal, self.tokens)
                children = texts.ids.repeat_interleave(tokens.shape[1], 0)
                children[:, place] = tokens.flatten()
                children = torch.cat([texts.ids, children]).unique(dim=0)
                tried = Texts(children, torch.full_like(children[:, 0], children.shape[1]))
                texts, cosine = _nearest(tables.encoder, tried, goal, self.kept)
                if cosine > 1 - self.arrived:
                    return texts, cosine
        return texts, cosine


class _Tables:
    """Every token alone and behind a common one, run once for all leaks of a model."""

    def __init__(self, encoder: Encoder) -> None:
        target, self.encoder = encoder.target, encoder
        self.bigrams = Bigrams(encoder)
        self.common = int(self.bigrams.share.argmax())
        tokens = torch.arange(target.vocabulary, device=encoder.device)
        pairs = torch.stack([torch.full_like(tokens, self.common), tokens], 1)
        texts = Texts(pairs, torch.full_like(tokens, 2))
        behind = encoder.vectors(texts, fast=True)
        encoder.whiten_by(behind)
        self.behind = encoder.directions(behind)
        self.alone = encoder.directions(self.bigrams.states)

    def last_tokens(self, goal: Tensor, count: int) -> Texts:
        """The texts of two tokens, the common one first, that come nearest."""
        tokens = (self.behind @ goal).topk(min(count, len(self.behind))).indices
        pairs = torch.stack([torch.full_like(tokens, self.common), tokens], 1)
        return Texts(pairs, torch.full_like(tokens, 2))

    def worth_trying(self, texts: Texts, place: int, goal: Tensor, most: int | None) -> Tensor:
        """The tokens (b, m) that are tried at a place of each text."""
        every = torch.arange(self.encoder.target.vocabulary, device=self.encoder.device)
        count = most or (len(every) if self.encoder.device.type == "cuda" else _ON_CPU)
        if count >= len(every):
            return every.expand(len(texts), -1)
        tokens = [self.bigrams.between(texts.ids, place).topk(count, dim=-1).indices]
        if place == texts.ids.shape[1] - 1:  # as near as a token comes behind another prefix
            near = (self.behind @ goal).topk(count).indices
            tokens.append(near.expand(len(texts), -1))
        _, slopes = self.encoder.slopes(texts, goal.expand(len(texts), -1))
        gains = slopes[:, place] @ self.encoder.table.T.to(slopes.dtype)
        tokens.append(gains.topk(max(1, count // _UPHILL), dim=-1).indices)
        return torch.cat(tokens, -1)


def _grown(texts: Texts, token: int) -> Texts:
    """A token put in front of every text."""
    front = torch.full_like(texts.ids[:, :1], token)
    return Texts(torch.cat([front, texts.ids], 1), texts.lengths + 1)


def _nearest(encoder: Encoder, texts: Texts, goal: Tensor, count: int) -> tuple[Texts, float]:
    """The texts that come nearest, run exactly at the end, and the cosine of the first."""
    rough = encoder.vectors(texts, fast=True) @ goal
    texts = texts[rough.topk(min(4 * count, len(texts))).indices]
    cosines = encoder.vectors(texts) @ goal
    order = cosines.argsort(descending=True)[:count]
    return texts[order], float(cosines[order[0]])
