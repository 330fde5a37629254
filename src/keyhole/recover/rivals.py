"""Could another token stand in the place of one? Rivals are tried by running the model.

With E(text) the misfit of a text in units of the leak's error, a rival's margin is how much larger
E becomes with the rival in the token's place: twice the logarithm of the odds against it. The
margin of a token is the least of its rivals'.

Not all of a vocabulary can be tried at each position. Those that might pass are the tokens of most
similar embedding e, and the tokens whose answer would be what leaked: with A the linear map from
embeddings to a row of the leak (answers.py) and r what the text leaves unexplained at its own
position, those of least ‖(e_v − e) A − r‖. In 112 tokens that were wrong within the noise, on a
model of four layers, these ten always held one that fits as well or better; of the tokens that the
gradient of E asks for, whose steps are far too long, the first three did in 15 to 20% of them.
Where the leak's error is above 5% of its spread, r says less: with noise of 20% a wrong token was
called verified because the right one came twentieth. There the first 32 are tried.
Where a position did not leak there is no r, and where rows are no position's own there is no A:
the gradient's are all there is besides the most similar ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.models.capture import capture
from keyhole.recover.answers import answers_of
from keyhole.recover.attack import Target
from keyhole.recover.leaks import Leak

_ALONE = 64  # rivals tried one by one; more only together
_AT_ONCE = 4096  # tokens in one pass
_SIMILAR = 4  # rivals of each token by its embedding,
_ANSWERING = 6  # … by what leaked at its position,
_NOISY = 32  # … where noise blurs it,
_WISHED = 3  # … and by the gradient


def exposed_rows(target: Target, leak: Leak, ids: Tensor) -> Tensor:
    """What the model gives for ids (b, n), as rows."""
    return leak.rows(target.expose(leak, ids, _mask(target, leak, len(ids))))


def margins(
    target: Target,
    leak: Leak,
    text: Tensor,
    misfits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    enough: float,
    noisy: bool = False,
) -> tuple[Tensor, int]:
    """The margin (n,) of each token over its nearest rival, and the passes that took.

    The whole leak speaks for a token: a row may say next to nothing about its own one ([CLS] in the
    lower layers of MiniLM), while all others do. So a rival is tried alone. In a long text only
    rivals at every 64th position, together, and each is judged by its own row; the first 64 whose
    margin is not `enough` so are tried alone, and so are the first 64 positions that did not leak
    (`hidden`). A leak that is `noisy` has more rivals.
    """
    size = max(1, _AT_ONCE // len(text))
    places = torch.arange(len(text), device=text.device)
    given = exposed_rows(target, leak, text[None])[0]
    before = misfits(given)

    def gains(rivals: Tensor, groups: Tensor) -> Tensor:
        """How much worse each row (g, n) fits with the rivals of a group (g, n) in their places.

        `rivals` are those of all groups (n,), or each group has its own (g, n).
        """
        swapped = torch.where(groups, rivals, text)
        rows = [misfits(exposed_rows(target, leak, part)) for part in swapped.split(size)]
        return torch.cat(rows) - before

    all_rivals = _rivals(target, leak, text, given, misfits, hidden, noisy)
    if len(text) <= _ALONE:  # each alone, in as few passes as hold them
        alone = (places == places[:, None]).repeat(len(all_rivals), 1)
        each = all_rivals.repeat_interleave(len(text), 0)
        return gains(each, alone).sum(-1).view_as(all_rivals).amin(0), 3 + len(alone)
    least, spent = torch.full(text.shape, torch.inf, device=text.device), 3
    for rival in all_rivals:
        groups = (places % _ALONE == places[:_ALONE, None]) & ~hidden
        margin = gains(rival, groups).where(groups, -torch.inf).amax(0)
        spent += len(groups)
        for part in (hidden, ~hidden & ~(margin > enough)):
            tried = part.nonzero().flatten()[:_ALONE]
            if len(tried):
                margin[tried] = gains(rival, places == tried[:, None]).sum(-1)
                spent += len(tried)
        least = torch.minimum(least, margin)
    return least, spent


def _rivals(
    target: Target,
    leak: Leak,
    text: Tensor,
    given: Tensor,
    misfits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    noisy: bool,
) -> Tensor:
    """The tokens (k, n) to be tried at each position."""
    rivals = [most_similar(target.parts.table, text)]
    answers = answers_of(target, leak.exposure)
    if answers is not None:
        leaked = leak.rows(leak.tensors).to(given)
        unexplained = answers.own(leaked - given).nan_to_num()
        count = _NOISY if noisy else _ANSWERING
        rivals.append(answers.nearest(target.parts.table, text, unexplained, count))
    if answers is None or bool(hidden.any()):
        rivals.append(_wished(target, leak, text, misfits))
    return torch.cat(rivals)


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


def most_similar(table: Tensor, text: Tensor) -> Tensor:
    """For each token the others (k, n) whose embeddings point most nearly the same way."""
    directions = torch.nn.functional.normalize(table.float(), dim=-1)
    count = min(_SIMILAR, len(table) - 1)
    rivals: list[Tensor] = []
    for part in text.split(64):
        likeness = directions[part] @ directions.T
        rivals.append(likeness.scatter_(1, part[:, None], -2.0).topk(count).indices)
    return torch.cat(rivals).T
