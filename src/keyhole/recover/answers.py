"""What a row of a leak says about its own token, to first order: a linear map from embeddings.

`row ≈ e A + b`, fitted on the rows that random tokens give in one and the same context. It is far
too coarse to read a token by, and good enough to say which few tokens might pass for another: those
whose row would be moved by what is left unexplained.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.core.numerics import with_ridge
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target

_SAMPLES = 4  # tokens for each number of an embedding
_CONTEXT = 4  # random tokens before the one that is looked at: the first of a text is no example
_RIDGE = 1e-5
_AT_ONCE = 512  # short texts in one pass
_FITTED: weakref.WeakKeyDictionary[nn.Module, dict[Exposure, Answers]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Answers:
    """`map` (e, f) from embeddings to rows, and the squared length (v,) of each token's answer.

    Of keys and values only the values count: keys may be rotated by their position. `heads` is
    their number, or 1.
    """

    map: Tensor
    sizes: Tensor
    heads: int

    def own(self, rows: Tensor) -> Tensor:
        """The part (n, f) of a leak's rows that is compared."""
        each = rows.unflatten(-1, (self.heads, -1))
        return each[..., -self.map.shape[1] // self.heads :].flatten(-2)

    def nearest(self, table: Tensor, text: Tensor, unexplained: Tensor, count: int) -> Tensor:
        """For each token the others (k, n) whose answers differ most nearly by `unexplained`."""
        wanted = table[text] @ self.map + unexplained.to(self.map)
        far = self.sizes - 2 * (wanted @ self.map.T) @ table.T
        far = far.scatter(1, text[:, None], torch.inf)
        return far.topk(min(count, len(table) - 1), largest=False).indices.T


def answers_of(target: Target, exposure: Exposure) -> Answers | None:
    """The map of a model's exposure, fitted once; None where rows are not those of positions."""
    if exposure.kind not in ("hidden", "kv", "attention"):
        return None
    fitted = _FITTED.setdefault(target.parts.base, {})
    if exposure not in fitted or fitted[exposure].map.device != target.parts.device:
        fitted[exposure] = _fit(target, exposure)
    return fitted[exposure]


def _fit(target: Target, exposure: Exposure) -> Answers:
    table = target.parts.table
    count = min(len(table), _SAMPLES * table.shape[1])
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randperm(len(table), generator=stream)[:count]
    before, after = target.frame()
    context = torch.randint(len(table), (_CONTEXT,), generator=stream).tolist()
    opening, ending = torch.tensor([*before, *context]), torch.tensor(after, dtype=torch.long)
    rows: list[Tensor] = []
    for part in tokens.split(_AT_ONCE):
        frame = [opening.expand(len(part), -1), part[:, None], ending.expand(len(part), -1)]
        with torch.no_grad():
            ids = torch.cat(frame, 1).to(target.parts.device)
            given = capture(target.model, exposure, ids=ids)["values"]
        rows.append(given[..., len(opening), :].flatten(1).double())
    words = table[tokens.to(table.device)].double()
    words, answers = words - words.mean(0), torch.cat(rows)
    square = with_ridge(words.T @ words, _RIDGE)
    linear = torch.linalg.solve(square, words.T @ (answers - answers.mean(0))).to(table)
    heads = target.parts.key_heads if exposure.kind == "kv" else 1
    return Answers(linear, (table @ linear).square().sum(-1), heads)
