"""Could another token stand in the place of one? Rivals are tried by running the model.

A token is distinguished from a rival if the leak is less likely with it, by odds of V·e¹⁰ : 1 for a
vocabulary of V tokens. Not all V can be tried at each position. Those that might pass are the token
of most similar embedding, and the tokens that the misfit itself asks for: with g the gradient of
the misfit with respect to the embedding e, those of least g·(e_v − e). Where a proposed text is
wrong within the noise, the right token is among the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.leaks import Leak

_ALONE = 64  # rivals tried one by one; more only together
_AT_ONCE = 4096  # tokens in one pass
_WISHED = 3  # rivals of each token that the gradient asks for


def exposed_rows(target: Target, leak: Leak, ids: Tensor) -> Tensor:
    """What the model gives for ids (b, n), as rows."""
    return leak.rows(target.expose(leak, ids, _mask(target, leak, len(ids))))


def distinguished(
    target: Target,
    leak: Leak,
    text: Tensor,
    misfits: Callable[[Tensor], Tensor],
    hidden: Tensor,
) -> tuple[Tensor, int]:
    """Where (n,) is the token distinguished from all its rivals? And the passes that took.

    The whole leak speaks for a token: a row may say next to nothing about its own one ([CLS] in the
    lower layers of MiniLM), while all others do. So a rival is tried alone. In a long text only
    rivals at every 64th position, together, and each is judged by its own row; the first 64 that
    are not distinguished so are tried alone, and so are the first 64 positions that did not leak
    (`hidden`).
    """
    odds = 2 * (math.log(target.vocabulary) + 10)
    size = max(1, _AT_ONCE // len(text))
    places = torch.arange(len(text), device=text.device)
    before = misfits(exposed_rows(target, leak, text[None])[0])

    def gains(rival: Tensor, groups: Tensor) -> Tensor:
        """How much worse each row (g, n) fits with the rivals of a group (g, n) in their places."""
        swapped = torch.where(groups, rival, text)
        rows = [misfits(exposed_rows(target, leak, part)) for part in swapped.split(size)]
        return torch.cat(rows) - before

    clear, spent = torch.ones_like(hidden), 3
    wished = _wished(target, leak, text, misfits)
    for rival in torch.cat([_nearest_other(target.parts.table, text)[None], wished]):
        apart = torch.zeros_like(hidden)
        if len(text) > _ALONE:
            groups = (places % _ALONE == places[:_ALONE, None]) & ~hidden
            apart = (groups & (gains(rival, groups) > odds)).any(0)
            spent += len(groups)
        for part in (hidden, ~apart & ~hidden):
            tried = part.nonzero().flatten()[:_ALONE]
            if len(tried):
                apart[tried] = gains(rival, places == tried[:, None]).sum(-1) > odds
                spent += len(tried)
        clear = clear & apart
    return clear, spent


def _wished(
    target: Target, leak: Leak, text: Tensor, misfits: Callable[[Tensor], Tensor]
) -> Tensor:
    """The tokens (k, n) that would lower the misfit most, to first order; one pass."""
    table = target.parts.table
    with torch.enable_grad():
        words = table[text][None].requires_grad_()
        mask = _mask(target, leak, 1)
        given = leak.rows(capture(target.model, leak.exposure, embeddings=words, mask=mask))
        (gradient,) = torch.autograd.grad(misfits(given[0]).sum(), words)
    change = gradient[0] @ table.T
    change[:, target.pads()] = torch.inf
    change = change.scatter(1, text[:, None], torch.inf)
    return change.topk(min(_WISHED, change.shape[1]), largest=False).indices.T


def _mask(target: Target, leak: Leak, count: int) -> Tensor | None:
    return None if leak.mask is None else leak.mask.to(target.parts.device).expand(count, -1)


def _nearest_other(table: Tensor, text: Tensor) -> Tensor:
    """For each token the other one whose embedding points most nearly the same way."""
    directions = torch.nn.functional.normalize(table.float(), dim=-1)
    rivals: list[Tensor] = []
    for part in text.split(64):
        likeness = directions[part] @ directions.T
        rivals.append(likeness.scatter_(1, part[:, None], -2.0).argmax(-1))
    return torch.cat(rivals)
