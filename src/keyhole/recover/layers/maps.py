"""Read text from the attention maps of one layer of an encoder.

`EncoderMaps` takes the model and the probabilities (heads, n, n), and proposes token
ids.

Log-ratios of the probabilities give q_h(x_i)·(k_h(x_j) − k_h(x_k)) for every head. At
layer 1 the special tokens are known, so each unknown token has three linear
measurements per head (as key to [CLS], as key to [SEP], as query over both). The 3H
numbers are looked up in the vocabulary.

Layer 1 has a closed form. The hidden states below it are the embeddings, which depend
only on the token and its position. So the whole vocabulary is measured at every
position in a few matrix products, for all texts of a length at once. Beyond the plain
look-up, each number is weighted by the error that rounding left in it (map_scores.py).
Further rounds use the tokens found so far as anchors too. They measure each position
2nH times instead of 3H, which settles what rounding left open.

Deeper layers have no closed form: the states below them depend on the whole text. They
are searched (token_search.py), on the scores `q·k` that the maps give away. So are the
first maps of models that add relative positions to their scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from keyhole.core import not_applicable
from keyhole.core.tensors import indices_of
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.layers.map_scores import Anchors, LogMaps, Questions
from keyhole.recover.layers.token_search import TokenSearch
from keyhole.recover.leaks import AttentionMaps, Leak

_EMBEDDINGS = Exposure("hidden", 0)
_SHORTLIST = 64  # candidates at a position in the rounds after the first
_ANCHORS = 48  # known tokens that measure a candidate in these rounds, at most
_AGREES = 1e-3  # of a probability
_NUMBERS = 2**24  # of hidden states in memory at a time


@dataclass(frozen=True)
class EncoderMaps:
    """Layer 1: look every position up in the vocabulary, then measure with the tokens found.

    There are at most `rounds` of these measurements. `deeper` searches for the text if
    the maps are of a deeper layer.
    """

    rounds: int = 4
    deeper: TokenSearch = field(default_factory=TokenSearch)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        maps = [cast("AttentionMaps", leak) for leak in leaks]
        if maps[0].layer > 1 or not _is_plain(target):
            yield from self.deeper.each(target, leaks)
            return
        if not any(target.frame()):
            reason = "no special tokens are known: the maps have no anchor"
            raise not_applicable(reason)
        by_length: dict[int, dict[int, LogMaps]] = defaultdict(dict)
        for number, leak in enumerate(maps):
            length = leak.values.shape[-1]
            by_length[length][number] = LogMaps.of(leak, target.device)
        for length, logs in by_length.items():
            frame = target.framed(length)
            shortlists = self._look_up(target, list(logs.values()), frame)
            for (number, log), short in zip(logs.items(), shortlists, strict=True):
                yield number, self._settle(target, log, frame, short)

    @torch.no_grad()
    def _look_up(
        self,
        target: Target,
        logs: list[LogMaps],
        frame: Tensor,
    ) -> list[Tensor]:
        """Return the best tokens of the vocabulary (shortlist, n) at each position of each text."""
        n = len(frame)
        known = indices_of(frame >= 0)
        states = _embedded(target, frame.clamp(min=0)[None])[0]
        anchors = Anchors.of(target.parts, 1, states, known)
        questions = [Questions.of(log, anchors) for log in logs]

        def misfit(tokens: Tensor) -> Tensor:
            measured = anchors.measure(_embedded(target, tokens[:, None].expand(-1, n)))
            return torch.stack([each.misfit(*measured).T for each in questions])

        batch_size = max(1, _NUMBERS // (n * target.parts.width))
        best = target.nearest_tokens(misfit, _SHORTLIST, batch_size)
        return [torch.where(frame >= 0, frame, short.T) for short in best]

    @torch.no_grad()
    def _settle(
        self,
        target: Target,
        log: LogMaps,
        frame: Tensor,
        shortlist: Tensor,
    ) -> Proposal:
        """Measure again with the tokens found so far as anchors, until nothing changes."""
        ids = shortlist[0]
        candidates = _embedded(target, shortlist)
        fixed = frame >= 0
        trusted = torch.ones_like(fixed)
        for _ in range(self.rounds):
            # The special tokens, and trusted ones evenly chosen.
            places = indices_of(fixed)
            others = indices_of(trusted & ~fixed)
            step = max(1, -(-len(others) // max(1, _ANCHORS - len(places))))
            places = torch.cat([places, others[::step]]).sort().values
            states = _embedded(target, ids[None])[0]
            anchors = Anchors.of(target.parts, 1, states, places)
            questions = Questions.of(log, anchors)
            # that measure one candidate text
            numbers = 2 * anchors.key_offset.numel() * len(ids)
            chunks = candidates.split(max(1, _NUMBERS // numbers))
            misfits = [questions.misfit(*anchors.measure(chunk)) for chunk in chunks]
            best = torch.cat(misfits).min(0)
            nearest = shortlist.gather(0, best.indices[None])[0]
            each = best.values / questions.numbers()
            # A token that fits far worse than most is wrong, and would mislead as an
            # anchor.
            trusted = (each <= each.median() + 1.0) | fixed
            if torch.equal(nearest, ids):
                break
            ids = nearest
        return Proposal(ids.tolist(), note="closed form")


@torch.no_grad()
def _is_plain(target: Target) -> bool:
    """Return whether the first maps are softmax(QKᵀ/√k) of the embeddings and nothing else."""
    parts = target.parts
    projections = parts.attention(1).projections
    size = parts.head_dim
    if projections is None or parts.key_heads != parts.heads:
        return False
    ids = target.tokens[None, -8:]
    states = _embedded(target, ids)
    q, k = (
        projection(states).unflatten(-1, (-1, size)).transpose(1, 2)
        for projection in projections[:2]
    )
    expected = (q @ k.mT / size**0.5).softmax(-1)
    words = parts.tokens(ids)
    given = capture(target.model, Exposure("maps", 1), embeddings=words)["values"]
    rounding = torch.finfo(parts.tokens.weight.dtype).eps
    return bool(torch.allclose(given, expected, atol=max(_AGREES, 2 * rounding)))


def _embedded(target: Target, ids: Tensor) -> Tensor:
    """Return the hidden states (b, n, d) below block 1."""
    # By embeddings, because RoBERTa derives positions from the ids.
    words = target.parts.tokens(ids)
    return capture(target.model, _EMBEDDINGS, embeddings=words)["values"]
