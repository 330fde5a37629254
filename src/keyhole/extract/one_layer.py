"""A one-layer Transformer with a ReLU network: about m·d queries for the network, 2d² for W.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), for

    F(X) = wᵀ ReLU(A · attn(X)),   attn(X) = Σ_i softmax_i(x_iᵀ W x_N) x_i,   no biases:

    F([x]) = wᵀ ReLU(A x)                     the network, by relu_network.py
    F(X) − F(−X) = (Aᵀw)ᵀ attn(X)             scores are even in X: one head, two queries each

and any method for a head learns W from the second line. Departures:

- (Aᵀw)ᵀx is known once the network is, so a head's length-one questions cost nothing.
- The paper gives up where Aᵀw = 0. But F = φ(attn(X)) with φ known and linear between hyperplanes:
  with x scaled up by t and δ down by t the score δᵀWx stays, and for t large enough x and x + δ
  lie in one cell of φ. There, with y = tx + δ/t,

      (F([y ; tx]) − F([tx])) / (F([y]) − F([tx])) = σ(δᵀWx),

  again two queries for one question to a head (F([tx]) = t·F([x]) is shared), now with any v we
  like. Differences of nearly equal answers cost a factor of about t² in precision, so this is
  the second choice.
- Only φ = 0 leaves W unknown: then every answer is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.extract.judge import Method, Step, settle
from keyhole.extract.relu_network import ReluNetwork
from keyhole.extract.single_head import SingleHead
from keyhole.oracle.planted import Head, OneLayer, ReluFfn
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask
from keyhole.results import Extraction, Status, Unsuccessful

_WEAK = 1e-3  # ‖Aᵀw‖ below this share of the network: one cell gives more digits
_ROOM = 1.01  # how much farther than x + δ the cell's nearest wall has to be
_FARTHEST = 1e12  # for t²: beyond, nothing is left of the difference


@dataclass(frozen=True)
class OneLayerTransformer:
    """Exact extraction of attention and network from scores (Section 4.1).

    `width` is the largest number of neurons, if it is known; `attention` any method for one head.
    """

    width: int | None = None
    attention: Method = field(default_factory=SingleHead)
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        self._network()  # refuses what it cannot use

    def __call__(self, oracle: Oracle) -> Extraction:
        return settle(self, oracle)

    def _network(self) -> ReluNetwork:
        return ReluNetwork(self.width, seed=self.seed, tolerance=self.tolerance)

    def expected(self, dim: int) -> int | None:
        network, attention = self._network().expected(dim), self.attention.expected(dim)
        if network is None or attention is None:
            return None
        return network + 2 * (attention - dim)  # its questions of length one are free

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        nothing = torch.zeros(d, d, dtype=torch.float64)
        network, known, floor = ReluFfn(nothing[:0], nothing[:0, 0]), 0, 0
        for step in self._network().steps(oracle):
            if isinstance(step.model, ReluFfn):
                network, known, floor = step.model, step.known, step.floor
                yield Step(OneLayer(nothing, network.A, network.w), known, floor + d * d)
        for step in self.attention.steps(_as_head(oracle, network)):
            if not isinstance(step.model, Head):
                raise Unsuccessful(
                    Status.NOT_APPLICABLE,
                    f"expected a method for one head, got one for {step.model.kind}",
                )
            model = OneLayer(step.model.W, network.A, network.w)
            yield Step(model, known + step.known - d, floor + step.floor - d)


def _as_head(oracle: Oracle, network: ReluFfn) -> Oracle:
    size = torch.linalg.vector_norm(network.A, dim=1) @ network.w.abs()
    if size == 0:
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE, "the network is zero: so is every answer, whatever W may be"
        )
    v = network.w @ network.A
    if torch.linalg.vector_norm(v) > _WEAK * size:
        return _Antisymmetric(oracle, v)
    return _InOneCell(oracle, network)


class _Antisymmetric:
    """`F(X) − F(−X)`: a head with v = Aᵀw."""

    def __init__(self, inner: Oracle, v: Tensor) -> None:
        self._inner = inner
        self._v = v

    @property
    def dim(self) -> int:
        return len(self._v)

    def __call__(self, sequences: Tensor) -> Tensor:
        if sequences.shape[1] == 1:
            return sequences[:, 0] @ self._v
        return _ask_pairs(self._inner, sequences, -sequences, lambda F: F[:, 0] - F[:, 1])


class _InOneCell:
    """A head with v = (1, …, 1), read inside single cells of φ; for one token or two."""

    def __init__(self, inner: Oracle, network: ReluFfn) -> None:
        self._inner = inner
        self._network = network

    @property
    def dim(self) -> int:
        return self._network.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1]
        if sequences.shape[1] == 1:
            return x.sum(1)
        if sequences.shape[1] > 2:
            raise InputError(f"expected one token or two, got {sequences.shape[1]}")
        delta = sequences[:, 0] - x
        sign, t = self._place(x, delta)
        far = x * t.unsqueeze(1)
        end = far + delta * (sign / t).unsqueeze(1)
        different, same = torch.unique(x, dim=0, return_inverse=True)
        start = t * ask(self._inner, different.unsqueeze(1))[same]  # φ(tx) = t·φ(x)

        def answer(F: Tensor) -> Tensor:
            rise, whole = (F - start[: len(F)].unsqueeze(1)).unbind(1)
            alpha = 0.5 + sign[: len(F)] * (rise / whole - 0.5)  # σ(−z) = 1 − σ(z)
            return sequences[: len(F), 1].sum(1) + alpha * delta[: len(F)].sum(1)

        # Two equal tokens attend to that token, whatever the weights: F([y ; y]) = φ(y).
        both = torch.stack([end, far], 1), torch.stack([end, end], 1)
        return _ask_pairs(self._inner, *both, answer)

    def _place(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sign of δ with the farther wall, and a t for which x ± δ/t² stays before it."""
        at, move = x @ self._network.A.mT, delta @ self._network.A.mT
        towards = (-move / at).nan_to_num(0.0, _FARTHEST, -_FARTHEST)
        ahead, behind = towards.amax(1), (-towards).amax(1)
        sign = torch.where(ahead <= behind, 1.0, -1.0).to(torch.float64)
        return sign, (_ROOM * torch.minimum(ahead, behind)).clamp(1.0, _FARTHEST).sqrt()


def _ask_pairs(
    oracle: Oracle, first: Tensor, second: Tensor, answer: Callable[[Tensor], Tensor]
) -> Tensor:
    """`answer` of the pairs (n, 2) of scores; if the budget ends, whole pairs are kept."""
    try:
        return answer(
            ask(oracle, torch.stack([first, second], 1).flatten(0, 1)).unflatten(0, (-1, 2))
        )
    except BudgetExhausted as end:
        if end.answers is None:
            raise
        pairs = end.answers[: len(end.answers) // 2 * 2].unflatten(0, (-1, 2))
        raise BudgetExhausted(end.budget, answer(pairs)) from end
