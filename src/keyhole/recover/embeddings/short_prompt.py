"""A short prompt from its next-token logits, by the weights alone: no corpus, no learning (ours).

**The last state** behind logits, exactly (after Carlini et al., arXiv 2403.06634):

    y = W h + b + c·1,    W (v, d) of full column rank, v ≫ d

with c = 0 for logits and c = −log Σ exp for log-probabilities. So h (and c) is the solution of
least squares in float64: d or d + 1 unknowns from v numbers, so rounding of the leak averages out.
Tokens whose logit did not leak are left out; d of them (or d + 1) have to be there. h is the state
behind the final norm, which has taken the length of the residual stream away. A prompt from its
logits is then text from one vector: `Pooled(last)` of that prompt.

**The prompt.** No other prompt gives the same state. One token is looked
up: all of them are run alone. Of a longer prompt the last token shows best in the state, whatever
stands before it, so all tokens are run behind a common one and the nearest are gone on with, by
cosines of whitened states (encoder.py). From there prompts grow to the left: a token is put in
front, then each place in turn is tried with all tokens, where that is affordable. Where it is not,
with those that the model itself finds likeliest between their neighbours (`Bigrams`), those that
the gradient points at and others at random; then with tokens whose embeddings are near the best
ones, as long as that helps. The cosine is smooth enough in the embedding for that: with SmolLM2 the
best of a token's 32 nearest in the first of two places comes to 0.92–1.00 in eight prompts of
eight, the best of 128 random ones to 0.72–0.91.

This ends at a few tokens; longer prompts are read with a corpus (reader.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count
from keyhole.models.capture import Exposure
from keyhole.models.next_token import unembedding
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.leaks import Leak, Logits, Pooled

_ON_CPU = 512  # tokens that are tried at a place, …
_SIMILAR = 48  # … then so many near each of the best, …
_CLIMBS = 6  # … so often at most
_COMMON = ","


@dataclass(frozen=True)
class ShortPrompt:
    """Look for prompts of up to `max_length` tokens, special ones left out.

    `kept` texts of each length are gone on with, and so many `tokens` are tried at each place of
    each of them (None: 512, or on a GPU all there are), in so many `sweeps` over the places.
    `arrived` is 1 − cosine.
    """

    max_length: int = 3
    kept: int = 16
    tokens: int | None = None
    sweeps: int = 2
    arrived: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("max_length", "kept", "tokens", "sweeps"):
            expect_count(name, getattr(self, name))

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        logits = [cast("Logits", leak) for leak in leaks]
        vectors, exposure = vectors_of(
            target.model, [replace(leak, values=leak.values[:1]) for leak in logits]
        )
        encoder = Encoder(target, replace(exposure, normalised=False))
        frame = len(encoder.before + encoder.after)
        lengths = [None if leak.tokens is None else leak.tokens - frame for leak in logits]
        if all(length is not None and length > self.max_length for length in lengths):
            raise self._too_long()
        tables = _Tables(encoder)
        preparing = encoder.passes
        goals = encoder.directions(vectors.to(encoder.device))
        for number, length in enumerate(lengths):
            if length is not None and length > self.max_length:
                continue
            before = encoder.passes
            text, cosine = self._search(tables, goals[number], length)
            ids = [*encoder.before, *text, *encoder.after]
            spent = encoder.passes - before
            yield number, Proposal(ids, spent, spent, preparing // len(leaks), loss=1 - cosine)
        if any(length is not None and length > self.max_length for length in lengths):
            raise self._too_long()

    def _too_long(self) -> Unsuccessful:
        reason = f"longer than the {self.max_length} tokens that are searched without --corpus"
        return Unsuccessful(Status.NOT_APPLICABLE, reason)

    def _search(self, tables: _Tables, goal: Tensor, length: int | None) -> tuple[list[int], float]:
        """The best text of one length, or of all up to the longest, and its cosine."""
        alone, token = (tables.alone @ goal).max(0)
        best = (float(alone), [int(token)])
        texts = tables.last_tokens(goal, self.kept)
        for n in range(2, (length or self.max_length) + 1):
            if length is None and best[0] > 1 - self.arrived:
                break
            if n > 2:  # a token put in front of every text
                front = torch.full_like(texts.ids[:, :1], tables.common)
                texts = Texts(torch.cat([front, texts.ids], 1), texts.lengths + 1)
            texts, cosine = self._swept(tables, texts, goal)
            own = (cosine, texts.tokens(0))
            best = own if n == length else max(best, own)
        return best[1], best[0]

    def _swept(self, tables: _Tables, texts: Texts, goal: Tensor) -> tuple[Texts, float]:
        """Texts of one length after every place was tried, the best first, and its cosine."""
        cosine = -2.0
        for _ in range(self.sweeps):
            for place in range(texts.ids.shape[1]):
                texts, cosine = self._placed(tables, texts, place, goal)
                if cosine > 1 - self.arrived:
                    return texts, cosine
        return texts, cosine

    def _placed(
        self, tables: _Tables, texts: Texts, place: int, goal: Tensor
    ) -> tuple[Texts, float]:
        """The same for one place: tokens from everywhere, then those near the best."""
        every = tables.encoder.target.vocabulary
        on_gpu = tables.encoder.device.type == "cuda"
        count = min(every, self.tokens or (every if on_gpu else _ON_CPU))
        tokens = tables.worth_trying(texts, place, goal, count)
        texts, cosine = self._best(tables, texts, place, tokens, goal)
        for _ in range(0 if count == every else _CLIMBS):
            tokens = tables.similar(texts.ids[:, place])
            before, (texts, cosine) = cosine, self._best(tables, texts, place, tokens, goal)
            if cosine <= before or cosine > 1 - self.arrived:
                break
        return texts, cosine

    def _best(
        self, tables: _Tables, texts: Texts, place: int, tokens: Tensor, goal: Tensor
    ) -> tuple[Texts, float]:
        """The best of texts and of those with other tokens (b, m) at a place; and its cosine."""
        ids = texts.ids.repeat_interleave(tokens.shape[1], 0)
        ids[:, place] = tokens.flatten()
        ids = torch.cat([texts.ids, ids]).unique(dim=0)
        tried = Texts.filled(ids)
        encoder = tables.encoder
        rough = encoder.vectors(tried, fast=True) @ goal
        tried = tried[rough.topk(min(4 * self.kept, len(tried))).indices]
        cosines = encoder.vectors(tried) @ goal  # exactly
        order = cosines.argsort(descending=True)[: self.kept]
        return tried[order], float(cosines[order[0]])


class _Tables:
    """Every token alone and behind a common one, run once for all leaks of a model."""

    def __init__(self, encoder: Encoder, seed: int = 0) -> None:
        target, self.encoder = encoder.target, encoder
        comma = target.tokenizer(_COMMON, add_special_tokens=False)["input_ids"]
        self.common = int(comma[-1]) if comma else target.pads()[0]
        tokens = torch.arange(target.vocabulary, device=encoder.device)[:, None]
        pairs = torch.cat([torch.full_like(tokens, self.common), tokens], 1)
        behind = encoder.values(Texts.filled(pairs))
        encoder.whiten_by(encoder.directions(behind))
        self.behind = encoder.directions(behind)
        alone = encoder.values(Texts.filled(tokens))
        self.alone = encoder.directions(alone)
        special = target.tokenizer.all_special_ids or target.pads()
        self.bigrams = Bigrams(target.model, behind, alone[special])
        self._embeddings = normalize(encoder.table.float(), dim=-1)
        self._generator = torch.Generator(encoder.device).manual_seed(seed)

    def last_tokens(self, goal: Tensor, count: int) -> Texts:
        """The texts of two tokens, the common one first, that come nearest."""
        tokens = (self.behind @ goal).topk(min(count, len(self.behind))).indices
        pairs = torch.stack([torch.full_like(tokens, self.common), tokens], 1)
        return Texts.filled(pairs)

    def worth_trying(self, texts: Texts, place: int, goal: Tensor, count: int) -> Tensor:
        """The tokens (b, m) that are tried at a place of each text; at the last, twice as many."""
        every = len(self._embeddings)
        if count == every:
            return torch.arange(every, device=texts.ids.device).expand(len(texts), -1)
        likely = self.bigrams.between(texts.ids, place).topk(-(-count // 2), dim=-1).indices
        shape = (len(texts), -(-count // 4))
        some = torch.randint(every, shape, generator=self._generator, device=likely.device)
        _, slopes = self.encoder.slopes(texts, goal.expand(len(texts), -1))
        gains = slopes[:, place] @ self.encoder.table.T.to(slopes.dtype)
        tokens = [likely, some, gains.topk(shape[1], dim=-1).indices]
        if place == texts.ids.shape[1] - 1:  # as near as a token comes behind another prefix
            near = (self.behind @ goal).topk(count).indices
            tokens.append(near.expand(len(texts), -1))
        return torch.cat(tokens, -1)

    def similar(self, tokens: Tensor) -> Tensor:
        """The tokens (b, m) of embeddings most like those of tokens (b,)."""
        likeness = self._embeddings[tokens] @ self._embeddings.T
        return likeness.topk(min(_SIMILAR, len(self._embeddings)), dim=-1).indices


# What a causal model itself expects of two tokens that stand together: a prior without a corpus.
#
# Every token is run once behind a common one. Its last state h gives log p(b | a) = (W h_a)_b − log
# Σ exp for every b, so the tokens can be put in the order in which the model finds them likely
# between two neighbours. The common token matters: states at the very first position say next to
# nothing of their token (SmolLM2 expects a hyphen after nearly every one).

_BIGRAMS_AT_ONCE = 512  # tokens: each takes as many numbers as there are tokens


class Bigrams:
    """`states` (v, d) are the last states of each token behind a common one.

    `starts` (s, d) are those of tokens that texts begin or end with: what follows them on average
    is what a text begins with.
    """

    def __init__(self, model: nn.Module, states: Tensor, starts: Tensor) -> None:
        head = unembedding(model)
        self._weight, self._bias = head.weight.detach(), cast("Any", head).bias
        self._states = states
        self._sums = torch.cat(
            [self._logits(part).logsumexp(-1) for part in states.split(_BIGRAMS_AT_ONCE)]
        )
        self._first = self._logits(starts).log_softmax(-1).logsumexp(0) - math.log(len(starts))

    def after(self, tokens: Tensor) -> Tensor:
        """log p(· | t) (b, v) for tokens (b,)."""
        return self._logits(self._states[tokens]) - self._sums[tokens][:, None]

    def before(self, tokens: Tensor) -> Tensor:
        """log p(t | ·) (b, v) for tokens (b,): how well each would stand before them."""
        logits = self._states @ self._weight[tokens].T
        if self._bias is not None:
            logits = logits + self._bias[tokens]
        return (logits - self._sums[:, None]).T

    def between(self, ids: Tensor, place: int) -> Tensor:
        """Scores (b, v) of every token at a place of texts (b, n), by its neighbours."""
        scores = self.after(ids[:, place - 1]) if place else self._first.expand(len(ids), -1)
        if place + 1 < ids.shape[1]:
            scores = scores + self.before(ids[:, place + 1])
        return scores

    def _logits(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self._weight, self._bias)


_DEPENDENT = 1e-10  # of the largest pivot: columns of W that say the same


def final_states(model: nn.Module, leak: Logits) -> Tensor:
    """The states (k, d) that give the logits, in float64."""
    head, leaked = unembedding(model), leak.leaked
    W = head.weight.detach().double().cpu()[leaked]
    answers = leak.values[:, leaked].double()
    bias = cast("Any", head).bias
    if bias is not None:
        answers = answers - bias.detach().double().cpu()[leaked]
    width = W.shape[1]
    if leak.log_probabilities:
        W = torch.cat([W, W.new_ones(len(W), 1)], 1)
    if len(W) < W.shape[1]:
        reason = f"{len(W)} logits leaked, and {W.shape[1]} are needed for the state behind them"
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, reason)
    Q, R = torch.linalg.qr(W)
    pivots = R.diagonal().abs()
    if bool(pivots.min() <= _DEPENDENT * pivots.max()):
        reason = "other states give the same logits: the unembedding has dependent columns"
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, reason)
    return torch.linalg.solve_triangular(R, Q.T @ answers.T, upper=True).T[:, :width]


def vectors_of(model: nn.Module, leaks: Sequence[Leak]) -> tuple[Tensor, Exposure]:
    """What leaked, as one vector of length one for each leak, and the exposure that gives such.

    Of logits: the last states, each of length one, side by side.
    """
    if isinstance(leaks[0], Pooled):
        values = torch.stack([cast("Pooled", leak).values for leak in leaks])
        return normalize(values, dim=-1), leaks[0].exposure
    logits = [cast("Logits", leak) for leak in leaks]
    first = logits[0]
    if all(torch.equal(leak.leaked, first.leaked) for leak in logits):  # W is factorised once
        every = replace(first, values=torch.cat([leak.values for leak in logits]))
        states = final_states(model, every).unflatten(0, (len(leaks), -1))
    else:
        states = torch.stack([final_states(model, leak) for leak in logits])
    vectors = normalize(normalize(states, dim=-1).flatten(1), dim=-1)
    return vectors.float(), Exposure("pooled", pooling="last", steps=first.exposure.steps)
