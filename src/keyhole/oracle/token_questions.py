"""Questions about the next token, in the form that every oracle takes: rows (token, bias).

Counters, ledgers and degraded answers are made for sequences of rows of numbers. A prompt of token
ids is such a sequence: a token and a zero in each row. A row at the end whose second number b is
not zero raises that token: b is added to its logit, as servers do that take a `logit_bias`.

The answer to a prompt alone is one number for each token of the vocabulary, logits or
log-probabilities. With raised tokens it is one number for each of those, in their order: the logit
without its b, up to a number that all tokens of one question share. A number that the target did
not give is `ABSENT`: it was asked for and paid for all the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.protocol import Oracle, OracleError, check_sequences, layers

DIM = 2
ABSENT = -1e6  # no log-probability: finite, so that a ledger remembers that there was none


def question(prompt: Tensor, raised: Tensor | None = None, biases: Tensor | None = None) -> Tensor:
    """One question (1, n, 2): the ids of a prompt, and those of tokens to raise by `biases`."""
    rows = torch.stack([prompt.double(), torch.zeros(len(prompt), dtype=torch.float64)], 1)
    if raised is None or biases is None:
        return rows[None]
    if bool((biases == 0).any()):
        raise InputError("every raised token needs a bias other than 0")
    return torch.cat([rows, torch.stack([raised.double(), biases.double()], 1)])[None]


def parts_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prompt's ids, the raised ids and their biases, of one question (n, 2)."""
    raised = rows[:, 1] != 0
    ids = rows[:, 0].long()
    return ids[~raised], ids[raised], rows[raised, 1]


class Logits:
    """Any function from token ids (batch, n) to logits or log-probabilities (batch, vocabulary).

    `identity` names the function in a ledger: its attribute of that name, or its own name.
    """

    dim = DIM

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    @property
    def identity(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return str(getattr(self.function, "identity", f"logits of {name}"))

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, DIM)
        prompt, raised, _ = parts_of(sequences[0])
        answers = self.function(sequences[:, : len(prompt), 0].long())
        if answers.ndim != 2:
            raise OracleError(
                f"expected logits of shape (batch, vocabulary), got {tuple(answers.shape)}"
            )
        if len(raised):
            chosen = sequences[:, len(prompt) :, 0].long()
            answers = answers.gather(1, chosen.to(answers.device))
        return answers


def stated_by(oracle: Oracle, size: str) -> int | None:
    """What the target says of itself, its `vocabulary` or `width`, behind all wrappers."""
    sizes = (getattr(layer, size, None) for layer in layers(oracle))
    return next((value for value in sizes if isinstance(value, int)), None)
