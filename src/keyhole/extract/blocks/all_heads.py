"""All numbers of all heads fitted at once, to answers for whole sequences (ours).

For a sequence `[w_1 ; … ; w_p ; x]`, a context of tokens w and a last token x, the
heads add

    Σ_h Σ_j softmax_j((xQ_h + q_h)·(w_j K_h))·w_j V_h O_h + b,        where j runs over x as well,

to x. The rest of the block, a known function (`behind`), turns the sum into an answer.
Reading heads step by step costs digits. This least-squares fit of Q, q, K, V, O and b
to many answers, by Gauss–Newton steps (descent.py), is as precise as the answers.
Shared keys and values, the frequencies of rotary positions and position biases are
fitted as well. Each context is used for many x, so most of the work is done once for a
context.

The preconditioner is that of K-FAC: for a map with inputs U (N, …) the Gram matrix of
the Jacobian is taken to be `UᵀU/N ⊗ SᵀS`, where S, the slopes of the answers by the
map's outputs, is sampled with one random direction of answers. Frequencies are a map
too, from positions to angles, and so are position biases, from distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks.descent import Params, descend, inverse
from keyhole.oracle.sub_layer import SubLayer, rotated

_MANY = 4.0  # numbers in answers for each unknown
_SPARE = 16
_LEAST = 3  # tokens in a context, at least
_FULL = (
    0.6  # weights of all heads in a sequence, as a share of the d numbers of an answer
)
_BASES = 3  # random bases that the tokens of contexts are taken from
_WIDEST = 0.95  # of the length that tokens behind a norm have at most


@dataclass(frozen=True)
class Sequences:
    """Contexts (s, p, d), and the last tokens x (s, n, d) that each context is used for."""

    contexts: Tensor
    x: Tensor

    @classmethod
    def drawn(
        cls,
        attention: SubLayer,
        stream: torch.Generator,
        length: float | None = None,
    ) -> Sequences:
        """Draw as many as the numbers of attention need.

        Contexts are so long that scores are about 1; so are the x, unless their
        `length` is given.
        """
        heads, d, k = attention.Q.shape
        size = min(d, max(_LEAST, int(_FULL * d / heads)))
        unknowns = sum(getattr(attention, name).numel() for name in attention.NAMES)
        # An answer shows as many numbers as its heads mix values in, at most what a
        # norm leaves.
        shown = min(attention.outputs - 1, heads * min(k, size))
        bases = torch.stack([random_orthogonal(d, stream) for _ in range(_BASES)])
        lists = d // size
        tokens = math.sqrt(d) * bases[:, : lists * size].unflatten(
            1, (lists, size)
        ).flatten(0, 1)
        count = math.ceil((_MANY * unknowns / shown + _SPARE) / len(tokens))
        x = torch.randn(len(tokens), count, d, generator=stream, dtype=torch.float64)
        x = (length or math.sqrt(d)) * normalize(x, dim=2)
        group = heads // len(attention.K)
        scores = (x[:, 0] @ attention.Q) * (
            tokens[:, 0] @ attention.K.repeat_interleave(group, 0)
        )
        score = float(scores.sum(2).square().mean().sqrt().clamp(min=1e-3))
        if length is None:
            return cls(tokens / math.sqrt(score), x / math.sqrt(score))
        return cls(tokens * min(1 / score, _WIDEST), x)

    @property
    def tokens(self) -> Tensor:
        """(s·n, p + 1, d)."""
        ahead = self.contexts[:, None].expand(-1, self.x.shape[1], -1, -1)
        return torch.cat([ahead, self.x[:, :, None]], 2).flatten(0, 1)


def fitted_heads(
    attention: SubLayer,
    sequences: Sequences,
    y: Tensor,
    behind: Callable[[Tensor], Tensor],
    device: torch.device | str,
    stream: torch.Generator,
) -> SubLayer:
    """Fit heads, starting from `attention`.

    `behind` maps what the heads add to the last tokens (s·n, m) to the answers y.
    """
    (heads, d, k) = attention.Q.shape
    groups = len(attention.K)
    contexts, x, y = (part.to(device) for part in (sequences.contexts, sequences.x, y))
    count, size = contexts.shape[:2]
    tokens = torch.cat([contexts.flatten(0, 1), x.flatten(0, 1)])
    one = torch.ones_like(x[..., :1])
    affine = torch.cat([x, one], 2).flatten(0, 1)
    positions = torch.arange(size, 0, -1.0).to(contexts).repeat(count)[:, None]
    # β at distance 0 is fixed to 0; distances beyond the length of a context do not
    # show.
    shown = max(0, min(size, attention.places.shape[-1] - 1))
    at_distance = torch.arange(1, shown + 1).to(contexts) == positions.clamp(max=shown)
    at_distance = at_distance.to(contexts)
    Q, K, V = (getattr(attention, name).transpose(0, 1).flatten(1) for name in "QKV")
    numbers = {
        "Q": torch.cat([Q, attention.q.flatten()[None]]),
        "K": K,
        "V": V,
        "O": torch.cat([attention.O.flatten(0, 1), attention.b[None]]),
        "frequencies": attention.frequencies.flatten()[None],
        "biases": attention.places[:, 1 : shown + 1].mT,
    }
    numbers = {name: part.to(device) for name, part in numbers.items() if part.numel()}

    def split(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into those of contexts and of x, by groups of heads (s, p or n, groups, …)."""
        ahead, own = rows.unflatten(1, (groups, -1)).split([count * size, len(affine)])
        return ahead.unflatten(0, (count, -1)), own.unflatten(0, (count, -1))

    def made(numbers: Params, moved: Params) -> tuple[Tensor, Tensor]:
        """Return the answers and the inputs of O.

        `moved` is added to the outputs of all maps: the slopes by it are S.
        """
        q = (affine @ numbers["Q"] + moved["Q"]).view(
            count, -1, groups, heads // groups, k
        )
        ahead, own = split(tokens @ numbers["K"] + moved["K"])
        if attention.rotary:
            angles = positions @ numbers["frequencies"] + moved["frequencies"]
            ahead = rotated(ahead, -angles.view(count, size, groups, -1))
        scores = torch.einsum("sngik,spgk->sngip", q, ahead)
        if shown:
            beta = at_distance @ numbers["biases"] + moved["biases"]
            beta = beta.view(count, size, groups, -1)
            scores = scores + beta.permute(0, 2, 3, 1).unsqueeze(1)
        weights = torch.cat(
            [scores, torch.einsum("sngik,sngk->sngi", q, own)[..., None]], -1
        )
        weights = weights.softmax(-1)
        ahead, own = split(tokens @ numbers["V"] + moved["V"])
        mixed = torch.einsum("sngip,spgv->sngiv", weights[..., :-1], ahead)
        mixed = (mixed + weights[..., -1:] * own[..., None, :]).flatten(2)
        mixed = torch.cat([mixed, one], 2).flatten(0, 1)
        return behind(mixed @ numbers["O"] + moved["O"]), mixed

    inputs = {
        "Q": affine,
        "K": tokens,
        "V": tokens,
        "O": affine,
        "frequencies": positions,
        "biases": at_distance,
    }
    still = {
        name: part.new_zeros(len(inputs[name]), part.shape[1])
        for name, part in numbers.items()
    }
    random = torch.randn(y.shape, generator=stream, dtype=torch.float64).to(device)

    def preconditioner(numbers: Params) -> Callable[[Params], Params]:
        (_, mixed), pull = torch.func.vjp(partial(made, numbers), still)[:2]
        slopes = pull((random, torch.zeros_like(mixed)))[0]
        into = {name: mixed if name == "O" else inputs[name] for name in numbers}
        left = {
            name: len(part) * inverse(part.mT @ part) for name, part in into.items()
        }
        right = {name: inverse(part.mT @ part) for name, part in slopes.items()}
        return lambda slope: {
            name: left[name] @ slope[name] @ right[name] for name in slope
        }

    numbers, _ = descend(
        lambda numbers: made(numbers, still)[0], numbers, y, preconditioner
    )
    numbers = {name: part.to("cpu") for name, part in numbers.items()}
    Q, K, V, O = (numbers[name] for name in "QKVO")  # noqa: E741
    biases = attention.places.clone()
    if shown:
        biases[:, 1 : shown + 1] = numbers["biases"].mT

    def apart(rows: Tensor, count: int) -> Tensor:
        return rows.unflatten(1, (count, -1)).transpose(0, 1).contiguous()

    return replace(
        attention,
        Q=apart(Q[:d], heads),
        q=Q[d].view(heads, k),
        K=apart(K, groups),
        V=apart(V, groups),
        O=O[:-1].unflatten(0, (heads, -1)).contiguous(),
        b=O[-1].contiguous(),
        frequencies=numbers.get("frequencies", attention.frequencies).view(groups, -1),
        places=biases,
    )
