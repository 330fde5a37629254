"""Questions about the next token, encoded as sequences of rows (token, bias).

In this form, counters, ledgers and defences, which are made for sequences of rows of
numbers, work for language models too. A prompt of token ids has one row (token, 0) for
each token. A row (token, b) with b ≠ 0 at the end raises that token: b is added to its
logit, like a server's `logit_bias`.

The answer to a prompt alone is one number for each token of the vocabulary: logits or
log-probabilities. If tokens are raised, it is one number for each of these, in their
order: the logit without its b, up to a constant shared by all tokens of the question. A
number that the target did not return is `ABSENT`; its question was asked and counts as
paid for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.float64 import zeros
from keyhole.oracle.protocol import OracleError, check_sequences

DIM = 2
# a log-probability that was not returned; finite, so that a ledger stores it
ABSENT = -1e6


def question(
    prompt: Tensor,
    raised: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Return a question (1, n, 2) of a prompt's token ids and of tokens to raise by `biases`."""
    rows = torch.stack([prompt.double(), zeros(len(prompt))], 1)
    if raised is None or biases is None:
        return rows[None]
    if (biases == 0).any():
        raise InputError("every raised token needs a bias other than 0")
    return torch.cat([rows, torch.stack([raised.double(), biases.double()], 1)])[None]


def parts_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the prompt's ids, the raised ids and their biases of one question (n, 2)."""
    raised = rows[:, 1] != 0
    ids = rows[:, 0].long()
    return ids[~raised], ids[raised], rows[raised, 1]


class Logits:
    """An oracle made of a function from token ids (batch, n) to logits (batch, vocabulary).

    Log-probabilities will do as well. A ledger knows the function by its attribute
    `identity`, or else by its name.
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
