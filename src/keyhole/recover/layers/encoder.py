"""Text from hidden states of a bidirectional encoder, at any layer.

The plain way is to minimise ‖f_ℓ(e) − h‖² over the input embeddings e from a cold start, by L-BFGS,
to snap to the token table, substitute and verify. Here, cheapest first:

1. Estimate e = h M + b by a linear map learnt from the weights (inverse_map.py), and read tokens
   off by cosine (TokenTable). One forward pass says whether they are right.
2. Error feedback: run the model on the snapped tokens and push the estimate by what is missing,
   e ← e + (h − f_ℓ(snap(e))) M, forward passes only. At the lower layers this ends the search.
3. Search: L-BFGS on e from the best estimate, preconditioned by the covariance of the map's error,
   a snap and one step of feedback after every few steps. Deeper layers need it. It goes in stages.
   All tokens of a long text converge slowly, though most are clear early; so after each
   stage candidates are tried at the positions that fit worst, each judged by its own row
   (trials.py), what is clear is fixed, and the next stage moves only the rest.
4. Substitution: where the search came near and stopped, a few tokens of many are wrong. The tokens
   nearest to the estimates are tried at each position (trials.py).

Special tokens of the tokenizer's frame are fixed at first; a text that is not found so is tried
again without. Of rows that leaked as directions the length comes first (row_length.py). Texts go
through in batches of similar length, and leave when they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from keyhole.core.errors import expect_count
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.encoder_batch import EncoderBatch, flip, replace, substitute
from keyhole.recover.layers.inverse_map import InverseMap, TokenTable, inverse_map
from keyhole.recover.layers.lbfgs import BatchedLBFGS
from keyhole.recover.layers.row_length import whole_rows
from keyhole.recover.layers.token_search import TokenSearch
from keyhole.recover.layers.trials import Comparison
from keyhole.recover.leaks import Leak

_FAR, _CLOSE = 0.3, 0.1  # the first step of a search for each token, in units of the map's error


@dataclass(frozen=True)
class EncoderStates:
    """Text from an encoder's hidden states.

    `feedback` forward passes at most are spent before the search, which takes `rounds` rounds of
    `steps` forward–backward passes: a stage of `opening` rounds, then stages of `stage` rounds.
    After each stage `trials` tokens are tried at the positions that fit worst (0: none are). In the
    end `candidates` tokens are tried at each position, in at most `sweeps` sweeps. `samples` random
    tokens fit the map (None: 48 for each number in a hidden state). `batch` is how many tokens go
    through the model at once.
    """

    feedback: int = 8
    rounds: int = 64
    steps: int = 4
    opening: int = 48
    stage: int = 4
    trials: int = 12
    flips: int = 3
    candidates: int = 8
    sweeps: int = 4
    samples: int | None = None
    batch: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "opening", "stage"):
            expect_count(name, getattr(self, name))
        for name in ("feedback", "rounds", "trials"):
            expect_count(name, getattr(self, name), least=0)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        leaks = whole_rows(target, leaks)
        samples = self.samples or max(4000, 48 * target.parts.width)
        back = inverse_map(target, leaks[0], samples, self.seed)
        table = TokenTable.of(target.parts.table, without=target.pads())
        for numbers in _batches(leaks, self.batch):
            batch = {number: leaks[number] for number in numbers}
            texts = EncoderBatch.of(target, batch, back, table)
            yield from self._recover(texts, back)

    def _recover(self, texts: EncoderBatch, back: InverseMap) -> Iterator[tuple[int, Proposal]]:
        for framed in (True, False):
            texts.begin(framed)
            yield from self._by_feedback(texts)
            yield from self._by_search(texts, back)
            if self.candidates and self.sweeps:
                yield from texts.leave(substitute(texts, self.candidates, self.sweeps))
            yield from texts.leave(texts.well_framed())

    def _by_feedback(self, texts: EncoderBatch) -> Iterator[tuple[int, Proposal]]:
        """Forward passes only, while they help."""
        texts.snap()
        for spent in range(self.feedback):
            if not len(texts):
                return
            yield from texts.leave(texts.check())
            if spent + 1 < self.feedback and texts.improving():
                texts.push()
                texts.snap()
            else:
                break
        texts.return_to_best()

    def _by_search(self, texts: EncoderBatch, back: InverseMap) -> Iterator[tuple[int, Proposal]]:
        """Gradients and trials in turn: what is clear after one stage is fixed in the next."""
        left, stage, first = self.rounds, self.opening, _FAR
        while left > 0 and len(texts):
            yield from self._by_gradients(texts, back, min(stage, left), first)
            left, stage, first = left - stage, self.stage, _CLOSE
            if self.trials:
                yield from texts.leave(replace(texts, self.trials))
            texts.settle()

    def _by_gradients(
        self, texts: EncoderBatch, back: InverseMap, rounds: int, first: float
    ) -> Iterator[tuple[int, Proposal]]:
        """L-BFGS, with a snap and a step of feedback after every few steps."""
        start = texts.anchored()
        search = BatchedLBFGS(
            torch.zeros_like(start).flatten(1), first * texts.unknowns**0.5, history=60
        )
        for _ in range(rounds):
            for _ in range(self.steps):
                search.step(texts.objective(start, back.root))
            texts.estimates = start + (search.z.view_as(start) @ back.root)
            texts.snap()
            done = texts.check()
            for flips in range(self.flips + 1):
                kept = torch.ones(len(texts), dtype=torch.bool, device=start.device)
                kept[done] = False
                yield from texts.leave(done)
                search.keep(kept)
                start = start[kept]
                if not len(texts):
                    return
                if flips == self.flips or not texts.improving(1):
                    break
                done = flip(texts)


def _batches(leaks: Sequence[Leak], tokens: int) -> Iterator[list[int]]:
    """The numbers of the leaks in batches of similar length, about `tokens` positions each."""
    order = sorted(range(len(leaks)), key=lambda number: leaks[number].length or 0)
    batch: list[int] = []
    for number in order:
        length = leaks[number].length or 0
        if batch and length * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@dataclass(frozen=True)
class SubLayerOutput:
    """Text from the attention sub-layer's output, before the residual, of one layer of an encoder.

    The inversion of one attention layer (keyhole.invert) with the vocabulary as prior. At layer 1
    that is `B = Σ_h softmax(X W_h Xᵀ) X V_h`: as many numbers as the embeddings have, but each
    position's output is a mixture of all tokens and holds little of its own. Levenberg–Marquardt
    alone would not know which of the solutions is a text. So first `states`, as for hidden states:
    a linear map learnt from the weights is a start from which gradients find the text (on MiniLM
    that reads layer 1). `search`, from the vocabulary's mean, takes what is left.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    states: EncoderStates = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        left: list[int] = []
        for number, proposal in self.states(target, leaks):
            comparison = Comparison.of(target, leaks[number])
            ids = torch.tensor([proposal.ids], device=target.parts.device)
            if float(comparison.losses(ids)[0]) <= comparison.tolerance:
                yield number, proposal
            else:
                left.append(number)
        for place, proposal in self.search.each(target, [leaks[number] for number in left]):
            yield left[place], proposal
