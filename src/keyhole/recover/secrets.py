"""Secrets that hide a leak (rotated, shielded, cloaked), and how known texts give them away.

`secrets_of` and `hidden_by` put a leak behind such a secret. `unrotated` and
`unshielded` take texts whose plain leaks are known and return other leaks without it;
`by_lengths` needs no known text.

Rows that attention reads can be multiplied by a secret matrix if the weights are
changed to match. So a cache or a store may hold secret rows without any change in the
model's answers. For each matrix of rows X (n, k) of a leak (hidden states have one,
keys and values one for each head), with blocks of b = 16 tokens:

    rotated      X R            R orthogonal, secret, the same for all texts
    shielded     X Π            Π permutes the numbers of a row, secret, the same for all texts
    cloaked      S P (X M + A)  S (b, b) orthogonal and secret; P permutes the tokens of a block,
                                drawn for every block, head and text; M rotates each
                                rotary plane; A is one secret row of a block, as large
                                as the text's numbers ask; the last block is filled up
                                to b rows. S and M are the same for all texts

The last two are for caches. *A First Look At Efficient And Secure On-Device LLM
Inference Against KV Leakage* (arXiv 2409.04040) proposes `shielded` (KV-Shield),
*Shadow in the Cache* (arXiv 2508.09442) `cloaked` (KV-Cloak).

An attacker who also uses the server has texts with known rows X and leaks Y. Then:

- A rotation keeps all distances. With U Σ Wᵀ the singular value decomposition of XᵀY, the
  orthogonal matrix that best maps X to Y is U Wᵀ (Schönemann, 1966). It is unique only
  on the span of the pairs. With r singular values above rounding, the r numbers y W_r
  equal f U_r for every other vector f and its stored form y; of the rest of f only the
  length is known. So m pairs give m numbers of every stored vector, as if it had been
  cut to m dimensions.
- If tokens are mixed as well (S P X M), rows are no pairs. But KV-Cloak's M has so few unknowns
  that the span of a block gives it away (layers/mixed.py).
- A permutation of numbers is known from a single row without repeated numbers: columns with equal
  numbers match.
- Rotations and permutations keep the length of each head's keys and values. In a first layer the
  lengths identify the token (`by_lengths`), and the tokens give pairs. No known text is
  needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.errors import InputError
from keyhole.core.float64 import identity, normal, zeros
from keyhole.core.tensors import seeded
from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.unordered import assigned
from keyhole.recover.leaks import HiddenStates, KeyValues, Leak, Pooled

SECRETS = ("rotated", "shielded", "cloaked")
BLOCK = 16  # tokens
# Singular values below this share of the largest are rounding of float32: those of
# rows, and those of XᵀY, about the squares of them.
_SPANNED = 1e-6
_ROUNDING = 1e-11
# the share of a leak's squares that may lie outside the span of known rows
_MAX_OUTSIDE = 1e-6
_UNIT = 2.84  # KV-Cloak's unit for what it adds, times the largest number of a cache


def matrices_of(leak: Leak) -> list[Tensor]:
    """Return the matrices of rows (n, k) that secrets are applied to."""
    if isinstance(leak, KeyValues):
        return [*leak.keys, *leak.values]
    if isinstance(leak, HiddenStates):
        return [leak.values]
    if isinstance(leak, Pooled):
        return [leak.values[None]]
    raise InputError(
        f"no secret is applied to {leak.exposure}: only to states, caches and vectors"
    )


def with_matrices(leak: Leak, matrices: list[Tensor]) -> Leak:
    """Return the leak with other rows."""
    if isinstance(leak, KeyValues):
        half = len(matrices) // 2
        keys = torch.stack(matrices[:half])
        values = torch.stack(matrices[half:])
        return replace(leak, keys=keys.float(), values=values.float())
    rows = matrices[0].float()
    return replace(leak, values=rows[0] if isinstance(leak, Pooled) else rows)


def hidden_by(secrets: Sequence[Secret], leak: Leak) -> Leak:
    """Return the leak as an attacker finds it who does not know the secrets."""
    pairs = zip(secrets, matrices_of(leak), strict=True)
    return with_matrices(
        leak, [secret.hide(matrix.double()) for secret, matrix in pairs]
    )


class Secret(NamedTuple):
    """The secret of one matrix of rows X: each block of it becomes Y = mix (X map + added).

    `mixes` has a matrix (b, b) for each block; without it, rows keep their places.
    """

    mixes: Sequence[Tensor] | None
    map: Tensor
    added: Tensor | None = None  # (b, k)

    def hide(self, rows: Tensor) -> Tensor:
        rows = (rows if self.added is None else _filled(rows)) @ self.map
        if self.mixes is None:
            return rows
        parts = rows.split(BLOCK)
        if self.added is not None:
            parts = [part + self.added for part in parts]
        return torch.cat(
            [mix @ part for mix, part in zip(self.mixes, parts, strict=True)]
        )


def secrets_of(
    leak: Leak,
    form: str,
    key: int,
    stream: torch.Generator,
) -> list[Secret]:
    """Return a secret for each matrix of a leak.

    `key` determines what all texts share, `stream` draws what is new for every text.
    """
    if form not in SECRETS:
        raise InputError(f"unknown form {form}: choose one of {', '.join(SECRETS)}")
    if form != "rotated" and not isinstance(leak, KeyValues):
        raise InputError(f"only keys and values can be {form}, not {leak.exposure}")
    matrices = matrices_of(leak)
    secret = seeded(key)
    if form == "cloaked":
        return [_cloak(matrix.double(), secret, stream) for matrix in matrices]
    widths = [matrix.shape[1] for matrix in matrices]
    if form == "shielded":
        drawn = [
            _permutation(torch.randperm(width, generator=secret)) for width in widths
        ]
    else:
        drawn = [random_rotation(width, secret) for width in widths]
    return [Secret(None, each) for each in drawn]


def _permutation(order: Tensor) -> Tensor:
    """Return the matrix P with which (P X)[i] is X[order[i]]."""
    return identity(len(order))[order]


def _filled(rows: Tensor) -> Tensor:
    """Return the rows with the last block filled up by one large number."""
    large = 1.5 * _UNIT * float(rows.abs().max())
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK), value=large)


def _cloak(
    rows: Tensor,
    secret: torch.Generator,
    stream: torch.Generator,
) -> Secret:
    """Return KV-Cloak's secret for one head's keys or values, with its default settings."""
    half = rows.shape[1] // 2
    angles = 2 * torch.pi * torch.rand(half, generator=secret, dtype=torch.float64)
    cos = angles.cos().diag()
    sin = angles.sin().diag()
    rotation = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
    mix = random_rotation(BLOCK, secret)
    added = zeros(BLOCK, rows.shape[1])
    place = int(torch.randint(BLOCK, (1,), generator=secret))
    drawn = torch.rand(rows.shape[1], generator=secret, dtype=torch.float64)
    added[place] = (3 + drawn) * _UNIT * rows.abs().max()
    orders = [torch.randperm(BLOCK, generator=stream) for _ in rows.split(BLOCK)]
    return Secret([mix @ _permutation(order) for order in orders], rotation, added)


def random_rotation(size: int, stream: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix in float64."""
    return torch.linalg.qr(normal(stream, size, size)).Q


class Alignment(NamedTuple):
    """Directions (d, r) of stored vectors y and of plain vectors f, with y `stored` = f `own`."""

    stored: Tensor
    own: Tensor

    def numbers(self, vectors: Tensor) -> Tensor:
        """Return the known numbers (b, r) of the plain vectors of stored ones (b, d)."""
        return vectors.to(self.stored) @ self.stored

    def undo(self, vectors: Tensor) -> Tensor:
        """Return the plain vectors (b, d) of stored ones, 0 in the unknown directions."""
        return self.numbers(vectors) @ self.own.T


def undo_rotation(known: Tensor, stored: Tensor) -> Alignment:
    """Return the part of a rotation that m pairs of plain and stored vectors (m, d) determine."""
    if known.shape != stored.shape or known.ndim != 2 or not len(known):
        raise InputError(
            "known and stored vectors must have the same shape (vectors, width), "
            f"got {tuple(known.shape)} and {tuple(stored.shape)}"
        )
    if not (known.isfinite() & stored.isfinite()).all():
        raise InputError("known and stored vectors must be finite")
    u, s, wt = torch.linalg.svd(known.double().T @ stored.double())
    rank = int((s > _ROUNDING * s[0]).sum())
    return Alignment(wt[:rank].T, u[:, :rank])


Pairs = Sequence[
    tuple[Leak, Leak]
]  # of known texts: the plain leak, and the leak with the secret


def unrotated(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Return leaks without their rotation, which the known texts determine."""
    pairs = _rows(known)
    _expect_spanned([stored for _, stored in pairs], leaks)
    found = [undo_rotation(plain, stored) for plain, stored in pairs]
    return _multiplied(
        leaks, [alignment.stored @ alignment.own.T for alignment in found]
    )


def unshielded(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Return leaks without their permutation of numbers, which the known texts determine."""
    pairs = _rows(known)
    orders = [assigned(torch.cdist(stored.mT, plain.mT)) for plain, stored in pairs]
    return _multiplied(leaks, [_permutation(order).mT for order in orders])


@torch.no_grad()
def by_lengths(target: Target, leaks: Sequence[Leak]) -> Pairs:
    """Return pairs from the leaks alone: in a first cache the lengths of rows identify tokens.

    With rotary positions the length of a row is the same at every position.
    """
    in_first = leaks[0].exposure.block(target.parts) == 1
    if not in_first or not all(isinstance(leak, KeyValues) for leak in leaks):
        raise not_applicable(
            "no text is known, and lengths identify tokens only in the first cache"
        )
    exposure = leaks[0].exposure
    pairs: list[tuple[Leak, Leak]] = []
    for leak in leaks:
        rows = torch.stack([matrix.norm(dim=1) for matrix in matrices_of(leak)], 1)
        length = 1 if target.parts.rotary else len(rows)

        def misfit(
            tokens: Tensor,
            rows: Tensor = rows,
            length: int = length,
        ) -> Tensor:
            given = capture(
                target.model, exposure, ids=tokens[:, None].expand(-1, length)
            )
            lengths = torch.cat(
                [given["keys"].norm(dim=-1), given["values"].norm(dim=-1)], 1
            )
            return (lengths.permute(2, 0, 1) - rows[:, None].to(lengths)).norm(dim=-1)

        ids = target.nearest_tokens(misfit, 1)[:, 0]
        given = capture(target.model, exposure, ids=ids[None].to(target.parts.device))
        found = {name: tensor[0].cpu() for name, tensor in given.items()}
        pairs.append((replace(leak, **found), leak))
    return pairs


def _expect_spanned(stored: Sequence[Tensor], leaks: Sequence[Leak]) -> None:
    """Raise `Unsuccessful` unless the leaks lie in the span of the stored rows of known texts.

    Those rows need not span all dimensions: layer normalisation leaves out one.
    """
    for number, rows in enumerate(stored):
        _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
        spanned = directions[sizes > _SPANNED * sizes[0]]
        for leak in leaks:
            given = matrices_of(leak)[number].double()
            inside = (given @ spanned.mT).square().sum() / given.square().sum()
            if 1 - float(inside) > _MAX_OUTSIDE:
                raise Unsuccessful(
                    Status.UNSOLVED,
                    f"the rows of known texts span {len(spanned)} of {rows.shape[1]} dimensions",
                )


def _rows(known: Pairs) -> list[tuple[Tensor, Tensor]]:
    """Return, for each matrix of a leak, the plain and the stored rows (m, k) of all texts."""
    if not known:
        raise InputError("at least one known text is needed")
    plain, stored = (
        [torch.cat(rows).double() for rows in zip(*map(matrices_of, side), strict=True)]
        for side in zip(*known, strict=True)
    )
    return list(zip(plain, stored, strict=True))


def _multiplied(leaks: Sequence[Leak], maps: list[Tensor]) -> list[Leak]:
    return [
        with_matrices(
            leak, [m.double() @ b for m, b in zip(matrices_of(leak), maps, strict=True)]
        )
        for leak in leaks
    ]
