"""Leaks behind a secret: rotated, shielded or cloaked under a key that the owner keeps; and undone.

Rows that attention reads can be multiplied by a secret matrix if the weights are changed to match,
so a cache or a store may hold them that way at no cost in answers. For each matrix of rows X (n, k)
of a leak (hidden states have one, keys and values one for each head), with b = 16 tokens a block:

    rotated      X R            R orthogonal, secret, the same for all texts
    shielded     X Π            Π permutes the numbers of a row, secret, the same for all texts
    cloaked      S P (X M + A)  S (b, b) orthogonal and secret, P exchanges the tokens of a block,
                                anew for every block, head and text; M rotates in each rotary
                                plane, A is one secret row of a block; blocks are filled up

The last two are of caches. *A First Look At Efficient And Secure On-Device LLM Inference Against KV
Leakage* (arXiv 2409.04040) proposes `shielded` (KV-Shield); *Shadow in the Cache* (arXiv
2508.09442) `cloaked` (KV-Cloak).

Whoever uses the server as well has texts that he knows, X, and their leaks Y. What follows:

- A rotation keeps every distance. With U S Wᵀ the singular value decomposition of XᵀY, the
  orthogonal matrix that comes nearest to X R = Y is U Wᵀ (Schönemann, 1966). It is unique only on
  what the pairs span: with r of the singular values above rounding, the r numbers y W_r are f U_r,
  exactly, for every other vector as well, and of the rest of f nothing but the length is known. So
  m pairs give m numbers of every stored vector, as if it had been cut to m dimensions.
- With tokens mixed as well (S P X M) rows are no pairs. KV-Cloak's M has so few unknowns that the
  span of a block gives it away (layers/mixed.py).
- A permutation of numbers is known from one known row, if no number is there twice: columns that
  hold the same numbers are the same.
- Rotations and permutations keep the length of each head's keys and values. In a first layer those
  lengths tell the token (`by_lengths`), and tokens that are known are pairs: no other is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.unordered import assigned
from keyhole.recover.leaks import HiddenStates, KeyValues, Leak, Pooled

SECRETS = ("rotated", "shielded", "cloaked")
BLOCK = 16  # tokens
_ROUNDING = 1e-11  # of the largest singular value of XᵀY, a product of two float32 matrices
_SPANNED = 1e-6  # of the largest singular value: less is rounding of float32
_OUTSIDE = 1e-6  # of the squares of a leak, outside of what is known
_LARGE = 2.84  # KV-Cloak's unit for what it adds, times the largest number of a cache


def matrices_of(leak: Leak) -> list[Tensor]:
    """The matrices of rows (n, k) that a secret is applied to, one by one."""
    if isinstance(leak, KeyValues):
        return [*leak.keys, *leak.values]
    if isinstance(leak, HiddenStates):
        return [leak.values]
    if isinstance(leak, Pooled):
        return [leak.values[None]]
    raise InputError(f"no secret is applied to {leak.exposure}: only to states, caches and vectors")


def with_matrices(leak: Leak, matrices: list[Tensor]) -> Leak:
    """The leak with other rows."""
    if isinstance(leak, KeyValues):
        half = len(matrices) // 2
        keys, values = torch.stack(matrices[:half]), torch.stack(matrices[half:])
        return replace(leak, keys=keys.float(), values=values.float())
    rows = matrices[0].float()
    return replace(leak, values=rows[0] if isinstance(leak, Pooled) else rows)


def hidden_behind(leak: Leak, form: str, key: int, stream: torch.Generator) -> Leak:
    """The leak as an attacker without `key` finds it; `stream` draws what is drawn anew."""
    return hidden_by(secrets_of(leak, form, key, stream), leak)


def hidden_by(secrets: Sequence[Secret], leak: Leak) -> Leak:
    pairs = zip(secrets, matrices_of(leak), strict=True)
    return with_matrices(leak, [secret.hide(matrix.double()) for secret, matrix in pairs])


def shown_again(hidden: Leak, secrets: Sequence[Secret], like: Leak) -> Leak:
    """What the owner of the secrets has of a hidden leak, as long as the plain one is."""
    pairs = zip(secrets, matrices_of(hidden), strict=True)
    rows = [secret.show(matrix.double())[: like.length] for secret, matrix in pairs]
    return with_matrices(hidden, rows)


@dataclass(frozen=True, eq=False)
class Secret:
    """What is done to one matrix of rows: Y = mix (X map + added), in each block of its own."""

    mixes: Sequence[Tensor] | None  # (b, b) of each block; None: rows stay where they are
    map: Tensor
    added: Tensor | None = None  # (b, k)

    def hide(self, rows: Tensor) -> Tensor:
        rows = (rows if self.added is None else _filled(rows)) @ self.map
        if self.mixes is None:
            return rows
        parts = rows.split(BLOCK)
        if self.added is not None:
            parts = [part + self.added for part in parts]
        return torch.cat([mix @ part for mix, part in zip(self.mixes, parts, strict=True)])

    def show(self, rows: Tensor) -> Tensor:
        if self.mixes is not None:
            pairs = zip(self.mixes, rows.split(BLOCK), strict=True)
            parts = [torch.linalg.solve(mix, part) for mix, part in pairs]
            rows = torch.cat(parts if self.added is None else [p - self.added for p in parts])
        return rows @ torch.linalg.inv(self.map)


def secrets_of(leak: Leak, form: str, key: int, stream: torch.Generator) -> list[Secret]:
    """The secrets that hide a leak, one for each of its matrices."""
    if form not in SECRETS:
        raise InputError(f"unknown form {form}: choose one of {', '.join(SECRETS)}")
    if form != "rotated" and not isinstance(leak, KeyValues):
        raise InputError(f"only keys and values can be {form}, not {leak.exposure}")
    matrices, secret = matrices_of(leak), torch.Generator().manual_seed(key)
    if form == "cloaked":
        return [_cloak(matrix.double(), secret, stream) for matrix in matrices]
    widths = [matrix.shape[1] for matrix in matrices]
    if form == "shielded":
        drawn = [_permutation(torch.randperm(width, generator=secret)) for width in widths]
    else:
        drawn = [_rotation(width, secret) for width in widths]
    return [Secret(None, each) for each in drawn]


def _permutation(order: Tensor) -> Tensor:
    """The matrix that takes rows in this order."""
    return torch.eye(len(order), dtype=torch.float64)[order]


def _filled(rows: Tensor) -> Tensor:
    """Rows that fill whole blocks, those behind the text with one large number."""
    large = 1.5 * _LARGE * float(rows.abs().max())
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK), value=large)


def _cloak(rows: Tensor, secret: torch.Generator, stream: torch.Generator) -> Secret:
    """KV-Cloak's secrets for one head's keys or values, with its usual settings."""
    half = rows.shape[1] // 2
    angles = 2 * torch.pi * torch.rand(half, generator=secret, dtype=torch.float64)
    cos, sin = angles.cos().diag(), angles.sin().diag()
    rotation = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
    mix = _rotation(BLOCK, secret)
    added = torch.zeros(BLOCK, rows.shape[1], dtype=torch.float64)
    place = int(torch.randint(BLOCK, (1,), generator=secret))
    drawn = torch.rand(rows.shape[1], generator=secret, dtype=torch.float64)
    added[place] = (3 + drawn) * _LARGE * rows.abs().max()
    orders = [torch.randperm(BLOCK, generator=stream) for _ in rows.split(BLOCK)]
    return Secret([mix @ _permutation(order) for order in orders], rotation, added)


def _rotation(size: int, stream: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=stream, dtype=torch.float64)).Q


@dataclass(frozen=True, eq=False)
class Alignment:
    """Directions (d, r) of stored vectors y and of those behind them, f: y `stored` = f `own`."""

    stored: Tensor
    own: Tensor

    def numbers(self, vectors: Tensor) -> Tensor:
        """What is known (b, r) of the vectors behind stored ones (b, d)."""
        return vectors.to(self.stored) @ self.stored

    def undo(self, vectors: Tensor) -> Tensor:
        """The vectors (b, d) behind stored ones, 0 in the directions that nobody knows."""
        return self.numbers(vectors) @ self.own.T


def undo_rotation(known: Tensor, stored: Tensor) -> Alignment:
    """What m pairs (m, d) of vectors tell of a rotation between them."""
    _expect_pairs(known, stored)
    u, s, wt = torch.linalg.svd(known.double().T @ stored.double())
    rank = int((s > _ROUNDING * s[0]).sum())
    return Alignment(wt[:rank].T, u[:, :rank])


def _expect_pairs(known: Tensor, stored: Tensor) -> None:
    if known.shape != stored.shape or known.ndim != 2 or not len(known):
        raise InputError(
            "known and stored vectors must have the same shape (vectors, width), "
            f"got {tuple(known.shape)} and {tuple(stored.shape)}"
        )
    if not bool((known.isfinite() & stored.isfinite()).all()):
        raise InputError("known and stored vectors must be finite")


Pairs = Sequence[tuple[Leak, Leak]]  # of a known text: its leak as it would be, and as it is


def unrotated(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks behind a rotation as they were."""
    pairs = _rows(known)
    _expect_spanned([stored for _, stored in pairs], leaks)
    found = [undo_rotation(plain, stored) for plain, stored in pairs]
    return _multiplied(leaks, [alignment.stored @ alignment.own.T for alignment in found])


def unshielded(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks behind a permutation of the numbers of a row as they were."""
    pairs = _rows(known)
    orders = [assigned(torch.cdist(stored.mT, plain.mT)) for plain, stored in pairs]
    return _multiplied(leaks, [_permutation(order).mT for order in orders])


@torch.no_grad()
def by_lengths(target: Target, leaks: Sequence[Leak]) -> Pairs:
    """Pairs for a rotation of a first layer's cache: what it keeps, lengths, tells the tokens."""
    first = KeyValues if leaks[0].exposure.block(target.parts) == 1 else ()
    if not all(isinstance(leak, first) for leak in leaks):
        raise Unsuccessful(
            Status.NOT_APPLICABLE, "no text is known, and lengths tell tokens in first caches alone"
        )
    exposure = leaks[0].exposure
    turned = bool(target.parts.rotary)  # then a row is as long at every position
    pairs: list[tuple[Leak, Leak]] = []
    for leak in leaks:
        rows = torch.stack([matrix.norm(dim=1) for matrix in matrices_of(leak)], 1)

        def misfit(tokens: Tensor, rows: Tensor = rows) -> Tensor:
            ids = tokens[:, None].expand(-1, 1 if turned else len(rows))
            given = capture(target.model, exposure, ids=ids)
            lengths = torch.cat([given["keys"].norm(dim=-1), given["values"].norm(dim=-1)], 1)
            return (lengths.permute(2, 0, 1) - rows[:, None].to(lengths)).norm(dim=-1)

        ids = target.nearest_tokens(misfit, 1)[:, 0]
        given = capture(target.model, exposure, ids=ids[None].to(target.parts.device))
        found = {name: tensor[0].cpu() for name, tensor in given.items()}
        pairs.append((replace(leak, **found), leak))
    return pairs


def _expect_spanned(stored: Sequence[Tensor], leaks: Sequence[Leak]) -> None:
    """What is solved for is known on what was seen: the leaks must lie in it, nearly.

    Rows need not span all dimensions: those of a layer normalisation leave one out.
    """
    for place, rows in enumerate(stored):
        _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
        seen = directions[sizes > _SPANNED * sizes[0]]
        for leak in leaks:
            given = matrices_of(leak)[place].double()
            inside = (given @ seen.mT).square().sum() / given.square().sum()
            if 1 - float(inside) > _OUTSIDE:
                raise Unsuccessful(
                    Status.UNSOLVED,
                    f"the rows of known texts span {len(seen)} of {rows.shape[1]} dimensions",
                )


def _rows(known: Pairs) -> list[tuple[Tensor, Tensor]]:
    """For each matrix of a leak all known rows (m, k), and those stored."""
    if not known:
        raise InputError("at least one known text is needed")
    plain, stored = (
        [torch.cat(rows).double() for rows in zip(*map(matrices_of, side), strict=True)]
        for side in zip(*known, strict=True)
    )
    return list(zip(plain, stored, strict=True))


def _multiplied(leaks: Sequence[Leak], back: list[Tensor]) -> list[Leak]:
    return [
        with_matrices(leak, [m.double() @ b for m, b in zip(matrices_of(leak), back, strict=True)])
        for leak in leaks
    ]
