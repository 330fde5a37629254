"""Text from the experts that a mixture-of-experts model chose for each of its tokens.

*Expert Selections In MoE Models Reveal (Almost) As Much As Text* (Nuriyev and Kulp,
arXiv 2602.04105) trains a decoder on 100 million tokens, which recovers 91.2% of the
tokens of texts of
32. Here nothing is trained: whoever has the weights runs the router. The choices at position i,

    S_ℓ(x_1 … x_i) = the k experts of layer ℓ with the largest logits,

depend only on the tokens up to i. So the text is read from left to right: every token
of the vocabulary is appended to every prefix that fits so far, and those are kept whose
choices are the leaked ones at all layers. If one text remains and none that fitted was
dropped, it is the only one with these choices, and `verified`. If several remain, the
one that the model finds most likely is returned.

If the routers' `probabilities` leaked as well, they must agree within 1e-4. Choices are
compared with a margin on the logits, because sums in another order differ by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError

_BATCH = 4096  # candidate tokens in one pass
_TOLERANCE = 1e-4  # of probabilities that count as equal
_MARGIN = 1e-4  # of the range of logits, for rounding


@dataclass(frozen=True)
class ExpertsRead:
    """The result: `ids` is the most likely text with these choices, one of `left` texts.

    `dropped` says whether a prefix that fitted was dropped. `certain` is the number of
    first tokens in which all texts that fit agree, before any was dropped, and `tested`
    that of tokens tried.
    """

    ids: list[int]
    verified: bool
    certain: int
    left: int
    dropped: bool
    tested: int


@torch.no_grad()
def router_logits(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Return the logits (texts, tokens, layers, experts) of all routers, and the model's output."""
    out = model(input_ids=ids, output_router_logits=True, **options)
    logits = getattr(out, "router_logits", None)
    if not logits:
        raise InputError("the model has no routers: give a mixture of experts")
    return torch.stack([each.view(*ids.shape, -1) for each in logits], 2), out


def choices_of(logits: Tensor, experts: int) -> Tensor:
    """Return the experts with the largest logits of each router, (…, layers, experts)."""
    return logits.topk(experts, -1).indices


@torch.no_grad()
def read_choices(
    model: Any,
    choices: Tensor,
    *,
    probabilities: Tensor | None = None,
    most: int = 16,
) -> ExpertsRead:
    """Read the text from choices (tokens, layers, experts); at most `most` prefixes are kept."""
    vocabulary = torch.arange(model.config.vocab_size, device=model.device)
    prefixes: list[tuple[float, list[int]]] = [(0.0, [])]
    certain = 0
    dropped = False
    tested = 0
    for at, chosen in enumerate(choices.to(model.device)):
        known = None if probabilities is None else probabilities[at].to(model.device)
        longer: list[tuple[float, list[int]]] = []
        for likelihood, prefix in prefixes:
            for tokens in vocabulary.split(_BATCH):
                logits, scores = _appended(model, prefix, tokens)
                tested += len(tokens)
                fits = _fits(logits, chosen)
                if known is not None:
                    fits &= (
                        ((logits.softmax(-1) - known).abs() <= _TOLERANCE)
                        .flatten(1)
                        .all(1)
                    )
                longer += [
                    (likelihood + float(scores[token]), [*prefix, token])
                    for token in tokens[fits].tolist()
                ]
        if not longer:
            break
        longer.sort(reverse=True)
        dropped |= len(longer) > most
        prefixes = longer[:most]
        if not dropped:
            certain = next(
                (
                    n
                    for n in range(at + 1)
                    if len({text[n] for _, text in prefixes}) > 1
                ),
                at + 1,
            )
    ids = prefixes[0][1]
    whole = len(ids) == len(choices)
    verified = whole and len(prefixes) == 1 and not dropped
    return ExpertsRead(
        ids, verified, certain, len(prefixes) if whole else 0, dropped, tested
    )


def _appended(model: Any, prefix: list[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Run each token after a prefix.

    Return the router logits (tokens, layers, experts), and the log-probabilities
    (vocabulary,) of the next token after the prefix.
    """
    if not prefix:
        logits, _ = router_logits(model, tokens[:, None])
        return logits[:, 0], logits.new_zeros(model.config.vocab_size)
    before = model(input_ids=tokens.new_tensor([prefix]), use_cache=True)
    cache = before.past_key_values
    cache.batch_repeat_interleave(len(tokens))
    logits, _ = router_logits(model, tokens[:, None], past_key_values=cache)
    return logits[:, 0], before.logits[0, -1].log_softmax(-1)


def _fits(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return which candidates (candidates, layers, experts) have the `chosen` (layers, k)."""
    inside = torch.zeros_like(logits[0], dtype=torch.bool).scatter_(-1, chosen, True)
    least = logits.masked_fill(~inside, torch.inf).amin(-1)
    most = logits.masked_fill(inside, -torch.inf).amax(-1)
    margin = _MARGIN * (logits.amax(-1) - logits.amin(-1))
    return (least >= most - margin).all(-1)
