"""Moves from a text to texts near it: one token replaced, put in, left out, or a piece moved.

Each takes parents (p, n) and gives children with the row of their parent. `tokens` (p, n, m) are
the tokens worth trying at each place, the best first: by the gradient, the prior, or a reader.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.recover.embedding.scoring import Texts

Children = tuple[Texts, Tensor]


def replaced(parents: Texts, tokens: Tensor) -> Children:
    """Every token at every place."""
    p, n, m = tokens.shape
    device = tokens.device
    rows = torch.arange(p, device=device)[:, None, None].expand(p, n, m)
    places = torch.arange(n, device=device)[None, :, None].expand(p, n, m)
    inside = parents.mask[..., None].expand(p, n, m)
    rows, places, chosen = rows[inside], places[inside], tokens[inside]
    ids = parents.ids[rows].clone()
    ids.scatter_(1, places[:, None], chosen[:, None])
    return Texts(ids, parents.lengths[rows]), rows


def inserted(parents: Texts, tokens: Tensor) -> Children:
    """Every token before every place, and behind the last one."""
    p, n, m = tokens.shape
    device = tokens.device
    rows = torch.arange(p, device=device)[:, None, None].expand(p, n, m)
    places = torch.arange(n, device=device)[None, :, None].expand(p, n, m)
    fits = (places <= parents.lengths[:, None, None]) & (parents.lengths < n)[:, None, None]
    rows, places, chosen = rows[fits], places[fits], tokens[fits]
    steps = torch.arange(n, device=device)
    source = (steps - (steps > places[:, None]).long()).clamp(min=0)
    ids = parents.ids[rows].gather(1, source)
    ids.scatter_(1, places[:, None], chosen[:, None])
    return Texts(ids, parents.lengths[rows] + 1), rows


def left_out(parents: Texts) -> Children:
    """Each token left out."""
    n = parents.ids.shape[1]
    device = parents.ids.device
    fits = parents.mask & (parents.lengths > 1)[:, None]
    rows, places = fits.nonzero().unbind(1)
    steps = torch.arange(n, device=device)
    source = (steps + (steps >= places[:, None]).long()).clamp(max=n - 1)
    return Texts(parents.ids[rows].gather(1, source), parents.lengths[rows] - 1), rows


def moved(parents: Texts, count: int, generator: torch.Generator) -> Children:
    """Two neighbouring pieces change places, at random cuts: swaps and moves of segments."""
    p, n = parents.ids.shape
    device = parents.ids.device
    rows = torch.arange(p, device=device).repeat_interleave(count)
    lengths = parents.lengths[rows]
    share = torch.rand(len(rows), 3, generator=generator, device=device)
    cuts = (share * (lengths[:, None] + 1)).long().sort(-1).values
    first, between, last = cuts.unbind(-1)
    steps = torch.arange(n, device=device)
    offset = steps - first[:, None]
    later = (last - between)[:, None]
    swapped = torch.where(offset < later, steps + (between - first)[:, None], steps - later)
    inside = (steps >= first[:, None]) & (steps < last[:, None])
    source = torch.where(inside, swapped, steps)
    return Texts(parents.ids[rows].gather(1, source.clamp(0, n - 1)), lengths), rows


def swapped(parents: Texts, count: int, generator: torch.Generator) -> Children:
    """Two tokens change places, wherever they stand."""
    p, _ = parents.ids.shape
    rows = torch.arange(p, device=parents.ids.device).repeat_interleave(count)
    share = torch.rand(len(rows), 2, generator=generator, device=rows.device)
    places = (share * parents.lengths[rows][:, None]).long()
    ids = parents.ids[rows]
    return Texts(ids.scatter(1, places, ids.gather(1, places.flip(1))), parents.lengths[rows]), rows


def crossed(parents: Texts, others: Texts) -> Children:
    """The beginning of each parent with the end of another text, cut at the same share of both."""
    p, n = parents.ids.shape
    device = parents.ids.device
    rows = torch.arange(p, device=device)
    steps = torch.arange(n, device=device)
    first = (parents.lengths + 1) // 2
    behind = (others.lengths - others.lengths // 2).clamp(max=n)
    source = (steps - first[:, None] + (others.lengths - behind)[:, None]).clamp(0, n - 1)
    ids = torch.where(steps < first[:, None], parents.ids, others.ids.gather(1, source))
    return Texts(ids, (first + behind).clamp(1, n)), rows


def together(*children: Children) -> Children:
    """The children of several moves."""
    texts = Texts.cat([texts for texts, _ in children]).clean()
    return texts, torch.cat([rows for _, rows in children])
