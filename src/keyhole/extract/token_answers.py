"""Rows of logits of a language model, also from a server that gives few of them, or none.

This takes an oracle that is asked by token ids, and random prompts, and returns one row
for each prompt, of which output_layer.py makes a matrix: the logits ℓ_i of all tokens i
that are asked about, up to one constant for the row. `WholeVectors` is for targets that
answer with every logit. Others give the best `top` = k tokens, after a bias that a
query may add to some. `ChosenTokens` reads ℓ_i − ℓ_r from them, for n tokens i and one
*reference* token r, the same in all rows:

    k ≥ 2    r and k − 1 tokens are raised above all others, so these come back with numbers.
             Their differences do not depend on the bias            ⌈(n − 1)/(k − 1)⌉ queries a row
    k = 1    one token is raised, so it is sampled. The server states its log-probability
             without the bias (oracle/completions.py)               n queries
    k = 0    no numbers: r is raised by b, i by b + t. At temperature 0 i is sampled if
             ℓ_i − ℓ_r + t > 0, and bisection of t measures ℓ_i − ℓ_r    20(n − 1) queries

Without a bias, a sampled token i shows only that ℓ_i ≥ ℓ_j for all j, and no rank: a
layer of width 2, whose rows lie on a circle, can give any sampled tokens.

The bias is added to a logit in float32, where every doubling of the sum costs a binary
digit. So the smallest bias that raises the tokens is used, and a larger one for a token
whose probability is still exactly zero. The reference has a larger one, so that it is
the token that is sampled: if that were part of a character (incomplete UTF-8), some
servers would give nothing.

A row with a missing number, or with one so improbable that float32 has no digits of it,
is paid for but not used.
"""

from __future__ import annotations

import itertools
from dataclasses import InitVar, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.float64 import Stream, full, zeros
from keyhole.core.machine import expect_memory
from keyhole.oracle.protocol import Oracle, ask
from keyhole.oracle.token_questions import ABSENT, question

# the logarithm of the smallest number that float32 holds with all digits
_MIN_LOG = -85.0
_MAX_UNUSABLE = 16  # unusable rows after which the attack gives up
# rows whose queries are sent at once: several servers may share them
_ROWS_AT_ONCE = 64
_BIASES = (16.0, 32.0, 64.0, 128.0)  # tried from the smallest
# lifts a token that is over 85 below the reference, so that float32 shows it
_EXTRA_BIAS = 48.0
_REFERENCE_BIAS = 16.0  # added to the bias of the reference
_PAIR_BIAS = 60.0  # raises two tokens to be compared; OpenAI allows biases up to 100
# differences within ±32 are bisected 20 times, to 6e-5
_RANGE = 32.0
_BITS = 20
_GIVEN = ABSENT / 2  # larger numbers were returned by the target
# how far the logarithm of the sum of rounded probabilities may be from 0
_NORMALISED = 0.5
_NONE = zeros(0)


@dataclass
class Prompts:
    """Random prompts of one length; while the vocabulary is not known, prompts of zeros.

    No prompt comes twice: equal answers would look like a rank that the layer does not
    have.
    """

    length: int
    stream: Stream

    def __post_init__(self) -> None:
        self._drawn: set[tuple[int, ...]] = set()

    def draw(self, vocabulary: int | None) -> Tensor:
        """Return a new prompt; raise Unsuccessful if there are no more."""
        while vocabulary is None or len(self._drawn) < vocabulary**self.length:
            size = (self.length,)
            prompt = torch.randint(vocabulary or 1, size, generator=self.stream)
            ids = tuple(prompt.tolist())
            if vocabulary is None or ids not in self._drawn:
                self._drawn.add(ids)
                return prompt
        raise Unsuccessful(
            Status.UNVERIFIED,
            f"all prompts of length {self.length} were asked: allow longer ones",
        )


@dataclass
class WholeVectors:
    """Answers with a number for every token of the vocabulary."""

    oracle: Oracle
    prompts: Prompts
    vocabulary: int | None
    step: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        self._rows: list[Tensor] = []

    @property
    def tokens(self) -> Tensor:
        return torch.arange(self.vocabulary or 0)

    def rows(self, count: int) -> Tensor:
        """Return the first `count` usable rows (count, tokens); missing ones are queried."""
        # Four matrices of float64: the rows, a centred copy, its basis, and LAPACK's
        # workspace.
        size = self.vocabulary or 0
        expect_memory(4 * 8 * count * size, f"{count:,} answers of {size:,} tokens")
        while len(self._rows) < count:
            self._rows.append(self.fresh(self.prompts))
        return torch.stack(self._rows[:count])

    def complete_rows(self) -> Tensor:
        """Return the rows that are complete already, without queries."""
        return torch.stack(self._rows) if self._rows else _NONE

    def fresh(self, prompts: Prompts) -> Tensor:
        """Return one more row, of another prompt, without keeping it."""
        for _ in range(_MAX_UNUSABLE):
            prompt = prompts.draw(self.vocabulary)
            answer = ask(self.oracle, question(prompt))[0]
            self.vocabulary = len(answer)
            least = _MIN_LOG if is_normalised(answer[None]) else ABSENT
            if answer.min() > least:
                return answer
        raise not_applicable(
            f"{_MAX_UNUSABLE} answers hold no numbers, or probabilities too small for float32"
        )


@dataclass
class ChosenTokens:
    """Answers about randomly chosen tokens, from a target that gives the best `top` tokens.

    n rows are about n + `spare` tokens, and `min_tokens` at least: a rank below n shows
    only if there are more columns than that. If more rows are wanted, more tokens are
    chosen, and the earlier rows are filled up.
    """

    oracle: Oracle
    prompts: Prompts
    vocabulary: int
    top: int
    min_tokens: int
    spare: int
    stream: InitVar[Stream]

    def __post_init__(self, stream: Stream) -> None:
        self._order = iter(torch.randperm(self.vocabulary, generator=stream).tolist())
        self._chosen: list[int] = []  # the reference first
        self._row_prompts: list[Tensor] = []
        # numbers of the chosen tokens, as far as they are known
        self._rows: list[Tensor] = []
        # the smallest one that was enough for the latest queries
        self._bias = _BIASES[0]

    @property
    def step(self) -> float | None:
        """The distance between neighbouring values that bisection can give, if it is used."""
        return None if self.top else 2 * _RANGE / 2**_BITS

    @property
    def tokens(self) -> Tensor:
        return torch.tensor(self._chosen)

    def rows(self, count: int) -> Tensor:
        """Return the first `count` rows (count, tokens); missing numbers are queried."""
        if not self._rows:
            self._choose_reference()
        wanted = max(count + self.spare, self.min_tokens)
        self._choose_tokens(min(self.vocabulary, wanted))
        while len(self._rows) < count:
            self._row_prompts.append(self.prompts.draw(self.vocabulary))
            self._rows.append(_NONE)
        for places in torch.arange(count).split(_ROWS_AT_ONCE):
            self._complete(places.tolist())
        return torch.stack(self._rows[:count])

    def complete_rows(self) -> Tensor:
        rows = [row for row in self._rows if len(row) == len(self._chosen)]
        return torch.stack(rows) if rows else _NONE

    def fresh(self, prompts: Prompts) -> Tensor:
        return self._new_row(prompts)[1]

    def _new_row(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Return a prompt for which the target gives all chosen tokens, and its row."""
        for _ in range(_MAX_UNUSABLE):
            prompt = prompts.draw(self.vocabulary)
            (row,) = self._read([prompt], [self._chosen])
            if row.min() > _GIVEN:
                return prompt, row
        raise not_applicable("the target gives no number for some tokens")

    def _complete(self, places: list[int]) -> None:
        """Query what the rows in these places miss; replace rows for which it is not given."""
        missing = [self._chosen[len(self._rows[place]) :] for place in places]
        more = self._read([self._row_prompts[place] for place in places], missing)
        for place, values in zip(places, more, strict=True):
            row = torch.cat([self._rows[place], values])
            if row.min() <= _GIVEN:
                self._row_prompts[place], row = self._new_row(self.prompts)
            self._rows[place] = row

    def _choose_reference(self) -> None:
        """Draw the first prompt, and find a reference token that the target gives for it.

        Unless k = 1 it is raised next to another one, as in all later queries.
        """
        prompt = self.prompts.draw(self.vocabulary)
        for reference in itertools.islice(self._order, _MAX_UNUSABLE + 1):
            second = (reference + 1) % self.vocabulary
            if self.top == 0:
                values = self._differences(prompt, reference, second)
            elif self.top == 1:
                values = self._logits([prompt], [[reference]])[0]
            else:
                values = self._logits([prompt], [[reference, second]])[0]
            if values.min() > ABSENT:
                self._chosen = [reference]
                self._row_prompts = [prompt]
                self._rows = [values if self.top == 1 else zeros(1)]
                return
        why = "raised tokens do not come back: the target takes no bias"
        if self.top != 1:
            why += ", or its answers do not show it, as they need not for top = 1"
        raise not_applicable(why)

    def _choose_tokens(self, count: int) -> None:
        """Choose more tokens, among those that the target gives for the first prompt."""
        while len(self._chosen) < count:
            wanted = count - len(self._chosen)
            if self.top:
                wanted = max(1, self.top - 1)
            group = list(itertools.islice(self._order, wanted))
            if not group:
                return
            (values,) = self._read(self._row_prompts[:1], [group])
            given = values > _GIVEN
            self._chosen += itertools.compress(group, given)
            self._rows[0] = torch.cat([self._rows[0], values[given]])

    def _read(self, prompts: list[Tensor], tokens: list[list[int]]) -> list[Tensor]:
        """Return the logits of tokens of each prompt, up to a constant for each prompt.

        Unless k = 1, the constant is the logit of the reference, whose own number, 0,
        takes no query. Queries that raise equally many tokens are sent together, as one
        tensor.
        """
        reference = self._chosen[0]
        parts: list[list[Tensor]] = []
        queries: list[tuple[int, list[int]]] = []  # a prompt's number, what is raised
        for number, (prompt, wanted) in enumerate(zip(prompts, tokens, strict=True)):
            others = wanted
            if self.top != 1:
                others = [token for token in wanted if token != reference]
            parts.append([zeros(len(wanted) - len(others))])
            if not self.top:
                parts[number].append(self._differences(prompt, reference, *others))
            elif self.top == 1:
                queries += [(number, [token]) for token in others]
            else:
                size = self.top - 1
                for start in range(0, len(others), size):
                    group = [reference, *others[start : start + size]]
                    queries.append((number, group))
        queries.sort(key=lambda query: -len(query[1]))
        for _, alike in itertools.groupby(queries, lambda query: len(query[1])):
            numbers, groups = zip(*alike, strict=True)
            values = self._logits([prompts[number] for number in numbers], list(groups))
            if self.top > 1:
                given = (values > ABSENT) & (values[:, :1] > ABSENT)
                values = torch.where(given, values - values[:, :1], ABSENT)[:, 1:]
            for number, row in zip(numbers, values, strict=True):
                parts[number].append(row)
        return [torch.cat(part) for part in parts]

    def _differences(self, prompt: Tensor, reference: int, *others: int) -> Tensor:
        """Return ℓ − ℓ_reference of other tokens, ABSENT outside of ±_RANGE, from what is sampled.

        It is between `low` and `low + step`, and every question halves this range. An
        answer has a number for the token that is sampled and ABSENT for the other, or a
        number for both.
        """
        low = full(-_RANGE, len(others))
        step = 2 * _RANGE
        sampled = torch.ones(len(others), dtype=torch.bool)
        pairs = torch.tensor([[reference, token] for token in others]).double()
        start = question(prompt).expand(len(others), -1, -1)
        for _ in range(_BITS if others else 0):
            step /= 2
            middle = low + step  # the difference that is asked about
            biases = torch.stack([middle.clamp(min=0), (-middle).clamp(min=0)], 1)
            biases = _PAIR_BIAS + biases
            questions = torch.cat([start, torch.stack([pairs, biases], 2)], 1)
            values = ask(self.oracle, questions)
            # The sampled token is the one with the largest raised logit.
            raised = torch.where(values > ABSENT, values + biases, -torch.inf)
            sampled &= raised.isfinite().any(1)
            low = torch.where(raised[:, 1] > raised[:, 0], middle, low)
        inside = sampled & (low > -_RANGE) & (low + step < _RANGE)
        return torch.where(inside, low + step / 2, ABSENT)

    def _logits(self, prompts: list[Tensor], groups: list[list[int]]) -> Tensor:
        """Return logits of raised tokens (groups, tokens), each group after its prompt.

        Biases grow until every token has a number. Tokens that have none at the largest
        bias, since next to the reference their probability is zero, are asked for once
        more with `_EXTRA_BIAS`.
        """
        tokens = torch.tensor(groups)
        values = full(ABSENT, *tokens.shape)
        more = torch.zeros_like(values)
        pending = torch.arange(len(groups))
        ladder = [bias for bias in _BIASES if bias >= self._bias]
        for bias in (*ladder, ladder[-1]):
            biases = bias + more
            biases[:, 0] += _REFERENCE_BIAS
            questions = [question(prompts[i], tokens[i], biases[i]) for i in pending]
            values[pending] = ask(self.oracle, torch.cat(questions))
            absent = values <= ABSENT
            pending = absent.any(1).nonzero()[:, 0]
            if not len(pending):
                self._bias = bias
                break
            if tokens.shape[1] == 1:
                break  # the oracle forces a single token with a bias of its own
            if bias == ladder[-1]:
                more[absent] = _EXTRA_BIAS
        return values


# rows of answers, and the tokens that they are about
Answers = WholeVectors | ChosenTokens


def is_normalised(answers: Tensor) -> bool:
    """Return whether whole answers (b, v) are log-probabilities, which add up to one."""
    return bool((torch.logsumexp(answers, 1).abs() <= _NORMALISED).all())
