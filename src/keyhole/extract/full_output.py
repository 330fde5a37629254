"""An attention layer, exactly, from the vectors it returns (ours).

Past *Provably Learning Attention with Queries* (arXiv 2601.16873), which reads scores. For one head

    O = A·(XV),  A = softmax_rows(X W Xᵀ):

V is read where A is known whatever W is; with V known, O is solved for A, and log-ratios of A
are bilinear forms of W, as many per answer as V has rank r. In queries:

    every token, causal      1 + ⌈d/r⌉        V from one sequence (probe_sequences.py)
    every token              d + ⌈d/r⌉        one row of V per query, then all of W at once
    last token               d + d·⌈d/r⌉ + 2  two of them ask whether there is one head

For the last token d + d²/r is also the number of unknowns over the numbers per answer. Which of
these an oracle is, and whether it is causal, shows in the answers themselves. Several heads are
told apart in the far field (head_values.py), for d queries more if every token answers and
(H − 1)·d + 32 or so if the last does; an answer then holds ⌊m/H⌋ forms of each head.

The plain way sends d + 1 tokens and solves one square system. Here keys are long and queries short
(probe_sequences.py), so that a rank below d, masks, and scales of W from 2⁻⁸⁰ to 2⁸⁰ are the same
computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import settle
from keyhole.extract.step import Step
from keyhole.extract.vectors.head_values import separate_values
from keyhole.extract.vectors.layer_forms import LayerForms
from keyhole.extract.vectors.probe_sequences import Panel, open_panel
from keyhole.oracle.planted import Attention
from keyhole.oracle.protocol import Oracle

_SAME = 1e-6  # relative; forms that disagree by more do not come from one head
_INDEPENDENT = 1e4  # the worst condition of values that are solved for side by side
_ATTEMPTS = 3
_EXTRA = 4  # tokens beyond a basis, to see whether the forms are linear: free with every token


@dataclass(frozen=True)
class FullOutput:
    """Exact extraction of a layer that returns vectors: one head or several.

    `resolution` is the singular value of V, relative to the largest, below which a direction of
    values counts as invisible; W is then read through the others.
    """

    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = 1e-6

    def __call__(self, oracle: Oracle) -> Extraction:
        return settle(self, oracle)

    def expected(self, dim: int) -> int | None:
        """The most that one head with invertible values takes; less if every token answers."""
        return 2 * dim + 2

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        panel, total = open_panel(oracle)
        stream = torch.Generator().manual_seed(self.seed)
        for step in self._search(panel, total, stream):
            # Where every token answers, one sequence could be long enough for everything.
            numbers = panel.outputs if not panel.every_token else step.floor or 1
            yield replace(step, numbers=numbers)

    def _search(self, panel: Panel, total: Tensor, stream: torch.Generator) -> Iterator[Step]:
        """One head if the answers can be one's, else several."""
        d, floor = panel.dim, panel.dim * (panel.dim + panel.outputs)
        # How many heads there are, and so how many unknowns, is open.
        first = Step(_layer(panel, torch.zeros(1, d, d), total[None]), total.numel(), None)
        yield first
        single = _SingleHead(panel, total, stream, self.resolution)
        if single.possible():
            yield from single.steps(floor)
            if single.confirmed:
                return
            yield first  # nothing but the sum of the values is known after all
        yield from _several_heads(panel, total, stream, floor)


def _several_heads(
    panel: Panel, total: Tensor, stream: torch.Generator, floor: int
) -> Iterator[Step]:
    """Values, then weights. Another key is tried where two heads look like one at the first."""
    d = panel.dim
    for attempt in range(_ATTEMPTS):
        last = attempt == _ATTEMPTS - 1
        try:
            V = separate_values(panel, total, stream, pairs=16 * 4**attempt)
            everything = len(V) * floor
            yield Step(_layer(panel, torch.zeros(len(V), d, d), V), V.numel(), everything)
            layer = _layer(panel, _all_heads(panel, V, stream), V)
        except Unsuccessful as end:
            if last or end.status is Status.NOT_IDENTIFIABLE:
                raise
            continue
        yield Step(layer, everything, None)
        if _agrees(panel, layer, stream):
            yield Step(layer, everything, everything)
            return


class _SingleHead:
    """The attempt to read the answers as those of one head with values V."""

    def __init__(self, panel: Panel, V: Tensor, stream: torch.Generator, resolution: float) -> None:
        self._panel = panel
        self._V = V
        self._stream = stream
        self._keys, self._rank = key_basis(V, resolution)
        self.confirmed = False

    def possible(self) -> bool:
        """Could it be? With every token, wait for the forms; else ask one key and one query.

        The answer to one key points where V says it does if there is one head; but answers of one
        number point nowhere else.
        """
        if not self._rank or self._panel.every_token:
            return bool(self._rank)
        key, x = _unit(2, self._panel.dim, self._stream)
        answer = self._panel.respond(key[None, None], x[None])[0, 0]
        value = key @ self._V
        weight = (answer @ value) / (value @ value)
        apart = torch.linalg.vector_norm(answer - weight * value)
        return bool(apart <= _SAME * torch.linalg.vector_norm(value))

    def steps(self, floor: int) -> Iterator[Step]:
        d = self._panel.dim
        X = random_orthogonal(d, self._stream)
        forms = LayerForms(self._panel, self._V[None], list(self._keys.split(self._rank)))

        def layer(Z: Tensor) -> Attention:
            """`Z = X W Δᵀ` for the first rows of X; the others count as zero."""
            W = torch.linalg.solve(self._keys, (X[: len(Z)].mT @ Z).mT).mT
            return _layer(self._panel, W[None], self._V[None])

        if self._panel.every_token:
            more = _unit(_EXTRA, d, self._stream)
            Z, errors = (part[0] for part in forms.measure(torch.cat([X, more])))
            apart = (Z[d:] - (more @ X.mT) @ Z[:d]).abs() - errors[d:] - errors[:d].sum(0)
            self.confirmed = bool((apart <= _SAME * Z.abs().max()).all())
            if self.confirmed:
                yield Step(layer(Z[:d]), floor, floor)
            return
        Z = torch.empty(0, d, dtype=torch.float64)
        told = floor if self._panel.outputs > 1 else None  # whether there is one head
        while len(Z) < d:
            part, errors = forms.measure(X[len(Z) : 2 * len(Z) + 1])
            _require_known(errors)
            Z = torch.cat([Z, part[0]])
            yield Step(layer(Z), self._V.numel() + Z.numel(), told)
        self.confirmed = _agrees(self._panel, layer(Z), self._stream)
        if self.confirmed:
            yield Step(layer(Z), floor, floor)


def key_basis(V: Tensor, resolution: float) -> tuple[Tensor, int]:
    """A basis of keys (rows) and the rank r of V: any r in a row have independent values.

    The first r are the left singular vectors u_i of V, whose values are orthogonal. Directions
    that V does not see ride on those: u_i + k.
    """
    U, sizes, _ = torch.linalg.svd(V, full_matrices=True)
    rank = int((sizes > resolution * sizes[0]).sum())
    keys = U.mT.clone()
    if rank:
        index = torch.arange(rank, len(keys))
        keys[index] += U.mT[index % rank]
    return keys, rank


def _all_heads(panel: Panel, V: Tensor, stream: torch.Generator) -> Tensor:
    """W of every head, with as many keys side by side as their values stay independent."""
    d = panel.dim
    keys, X = random_orthogonal(d, stream), random_orthogonal(d, stream)
    for p in range(max(1, min(d, panel.outputs // len(V))), 0, -1):
        blocks = list(keys.split(p))
        if all(_condition(block @ V) < _INDEPENDENT for block in blocks):
            break
    else:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"the values of the {len(V)} heads depend on each other: their weights cannot be told",
        )
    Z, errors = LayerForms(panel, V, blocks).measure(X)
    _require_known(errors)
    return X.mT @ Z @ keys


def _agrees(panel: Panel, layer: Attention, stream: torch.Generator) -> bool:
    """One question with two keys and scores of about 1: are these the right heads?"""
    keys, x = _unit(2, panel.dim, stream), _unit(1, panel.dim, stream)
    z = (x @ layer.W @ keys.mT).squeeze(1)  # (H, 2)
    square = float(1 / z.abs().max().clamp(min=2.0**-80))
    weights = (square * z).exp()
    weights = weights / (panel.references(1, 0) + weights.sum(1, keepdim=True))
    expected = torch.einsum("hj,jd,hdm->m", weights, keys, layer.V)
    answer = panel.respond(keys.unsqueeze(0), x, square)[0, 0]
    return bool((answer - expected).abs().max() <= _SAME * expected.abs().max())


def _condition(values: Tensor) -> float:
    sizes = torch.linalg.svdvals(values.flatten(0, 1))
    if values.shape[0] * values.shape[1] > values.shape[2]:
        return math.inf
    return float(sizes[0] / sizes[-1])


def _require_known(errors: Tensor) -> None:
    if not bool(torch.isfinite(errors).any()):
        raise Unsuccessful(
            Status.MISMATCH, "the answers leave the range that attention weights allow"
        )


def _unit(count: int, d: int, stream: torch.Generator) -> Tensor:
    raw = torch.randn(count, d, generator=stream, dtype=torch.float64)
    return raw / torch.linalg.vector_norm(raw, dim=1, keepdim=True)


def _layer(panel: Panel, W: Tensor, V: Tensor) -> Attention:
    W, V = W.to(torch.float64), V.contiguous()
    if not bool(torch.isfinite(W).all() and torch.isfinite(V).all()):
        raise Unsuccessful(Status.MISMATCH, "no finite weights explain the answers")
    return Attention(W.contiguous(), V, every_token=panel.every_token, causal=panel.causal)
