"""A one-layer Transformer with a ReLU network: about m·d queries for the network, 2d² for W.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), for

    F(X) = wᵀ ReLU(A · attn(X)),   attn(X) = Σ_i softmax_i(x_iᵀ W x_N) x_i,   no biases:

    F([x]) = wᵀ ReLU(A x)                     the network, by relu_network.py
    F(X) − F(−X) = (Aᵀw)ᵀ attn(X)             scores are even in X: one head, two queries each

and any method for a head learns W from the second line. Departures:

- (Aᵀw)ᵀx is known once the network is, so a head's queries of length one cost nothing.
- The paper excludes Aᵀw = 0. But F = φ(attn(X)) with φ known and linear between hyperplanes. If x
  is scaled up by t and δ down by t, the score δᵀWx is the same, and for large t both x
  and x + δ lie in one region of φ. There, with y = tx + δ/t,

      (F([y ; tx]) − F([tx])) / (F([y]) − F([tx])) = σ(δᵀWx),

  which is again two queries for one query of a head (F([tx]) = t·F([x]) is shared), now
  with any v we choose. Differences of nearly equal answers cost a factor of about t² in
  precision, so this is the second choice.
- W remains unknown only if φ = 0: then every answer is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import not_applicable, not_identifiable
from keyhole.core.errors import InputError
from keyhole.core.float64 import zeros
from keyhole.extract.bilinear import Derived, ask_through, lengths
from keyhole.extract.extraction import Step, setting
from keyhole.extract.judge import Method
from keyhole.extract.relu_network import ReluNetwork
from keyhole.extract.single_head import SingleHead
from keyhole.oracle.planted import Head, OneLayer, ReluFfn
from keyhole.oracle.protocol import Oracle, ask

# if ‖Aᵀw‖ is below this share of the network's size, one region gives more digits
_WEAK = 1e-3
# the nearest wall of the region must be so many times farther away than x + δ
_MARGIN = 1.01
# the largest t²: with a larger one, the difference is lost in rounding
_FARTHEST = 1e12


@dataclass(frozen=True)
class OneLayerTransformer(Method):
    """Exact extraction of attention and network from scores (Section 4.1).

    `attention` is any method for one head.
    """

    width: int | None = setting(None, "the largest number of neurons, if it is known")
    attention: Method = field(default_factory=SingleHead)
    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = setting(
        1e-12,
        "how far an answer may be off a linear piece; more if answers are rounded",
    )

    def __post_init__(self) -> None:
        self._network()  # raises InputError for settings that it refuses

    def _network(self) -> ReluNetwork:
        return ReluNetwork(
            self.width,
            seed=self.seed,
            tolerance=self.tolerance,
            resolution=self.resolution,
        )

    def expected_queries(self, dim: int) -> int | None:
        network = self._network().expected_queries(dim)
        attention = self.attention.expected_queries(dim)
        if network is None or attention is None:
            return None
        return network + 2 * (attention - dim)  # its queries of length one are free

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        nothing = zeros(d, d)
        network = ReluFfn(nothing[:0], nothing[:0, 0])
        known = 0
        unknowns = None
        for step in self._network().steps(oracle):
            if isinstance(step.model, ReluFfn):
                network = step.model
                known = step.known
                unknowns = step.unknowns
                model = OneLayer(nothing, network.A, network.w)
                yield Step(model, known, _sum(unknowns, d * d))
        for step in self.attention.steps(_as_head(oracle, network)):
            if not isinstance(step.model, Head):
                raise not_applicable(
                    f"attention must be a method for one head, not for {step.model.kind}"
                )
            model = OneLayer(step.model.W, network.A, network.w)
            yield Step(model, known + step.known - d, _sum(unknowns, step.unknowns, -d))


def _sum(*counts: int | None) -> int | None:
    """Return how many unknowns there are in all; None if some of them are not counted yet."""
    if None in counts:
        return None
    return sum(count for count in counts if count is not None)


def _as_head(oracle: Oracle, network: ReluFfn) -> Oracle:
    """Return a head with the oracle's W, seen through the known network."""
    size = lengths(network.A) @ network.w.abs()
    if size == 0:
        raise not_identifiable(
            "the network is zero: so is every answer, whatever W may be"
        )
    v = network.w @ network.A
    if lengths(v) > _WEAK * size:
        return _antisymmetric(oracle, v)
    return _InOneRegion(oracle, network)


def _antisymmetric(oracle: Oracle, v: Tensor) -> Oracle:
    """Return `F(X) − F(−X)`: a head with v = Aᵀw, which is known."""

    def answers(sequences: Tensor) -> Tensor:
        if sequences.shape[1] == 1:
            return sequences[:, 0] @ v
        return _ask_pairs(oracle, sequences, -sequences, lambda F: F[:, 0] - F[:, 1])

    return Derived(oracle.dim, answers)


@dataclass(frozen=True)
class _InOneRegion:
    """A head with v = (1, …, 1), read inside single regions of φ; for one token or two."""

    oracle: Oracle
    network: ReluFfn

    @property
    def dim(self) -> int:
        return self.network.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1]
        if sequences.shape[1] == 1:
            return x.sum(1)
        if sequences.shape[1] > 2:
            raise InputError(
                f"a sequence must have one or two tokens: got {sequences.shape[1]}"
            )
        delta = sequences[:, 0] - x
        sign, t = self._place(x, delta)
        far = x * t[:, None]
        end = far + delta * (sign / t)[:, None]
        different, same = torch.unique(x, dim=0, return_inverse=True)
        start = t * ask(self.oracle, different[:, None])[same]  # φ(tx) = t·φ(x)

        def answer(F: Tensor) -> Tensor:
            count = len(F)
            rise, whole = (F - start[:count, None]).unbind(1)
            alpha = 0.5 + sign[:count] * (rise / whole - 0.5)  # σ(−z) = 1 − σ(z)
            return x[:count].sum(1) + alpha * delta[:count].sum(1)

        # Two equal tokens attend to that token, whatever the weights: F([y ; y]) =
        # φ(y).
        pairs = torch.stack([end, far], 1)
        equal = torch.stack([end, end], 1)
        return _ask_pairs(self.oracle, pairs, equal, answer)

    def _place(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sign of δ with the farther wall, and a t so that x ± δ/t² is before it."""
        ratio = -(delta @ self.network.A.mT) / (x @ self.network.A.mT)
        ratio = ratio.nan_to_num(0.0, _FARTHEST, -_FARTHEST)
        ahead = ratio.amax(1)
        behind = (-ratio).amax(1)
        sign = torch.where(ahead <= behind, 1.0, -1.0).double()
        square = _MARGIN * torch.minimum(ahead, behind)
        return sign, square.clamp(1.0, _FARTHEST).sqrt()


def _ask_pairs(
    oracle: Oracle,
    first: Tensor,
    second: Tensor,
    answer: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return `answer` of the pairs (n, 2) of scores; if the budget ends, that of whole pairs."""

    def paired(scores: Tensor) -> Tensor:
        return answer(scores[: len(scores) // 2 * 2].unflatten(0, (-1, 2)))

    return ask_through(oracle, torch.stack([first, second], 1).flatten(0, 1), paired)
