"""What an attacker may ask: the protocol, the one place where questions are put, and counting.

An oracle is any callable with `.dim` that maps sequences (batch, n, dim) in float64 to answers:
(batch,) a score, (batch, m) the last token's vector, or (batch, n, m) a vector for every token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.progress import Progress, silent


@runtime_checkable
class Oracle(Protocol):
    @property
    def dim(self) -> int: ...

    def __call__(self, sequences: Tensor) -> Tensor: ...


class OracleError(KeyholeError):
    """The oracle did not answer as an oracle must. The CLI exits with 3.

    `answers` holds the batch when part of it is good, so that a ledger can keep that part.
    """

    def __init__(self, message: str, answers: Tensor | None = None) -> None:
        super().__init__(message)
        self.answers = answers


class NotFinite(InputError):
    """A question that holds NaN or infinity: whoever asks it is at fault, not the oracle."""

    def __init__(self) -> None:
        super().__init__("the sequences hold NaN or infinity")


class BudgetExhausted(KeyholeError):
    """No queries are left. `answers` holds what was still paid for of the batch, in order."""

    def __init__(self, budget: int, answers: Tensor | None = None) -> None:
        super().__init__(f"the budget of {budget:,} queries is spent")
        self.budget = budget
        self.answers = answers


def check_sequences(sequences: object, dim: int) -> Tensor:
    """Refuse a question that no target can answer, in one line."""
    if not isinstance(sequences, Tensor):
        raise InputError(f"expected a torch tensor of sequences, got {type(sequences).__name__}")
    shape = tuple(sequences.shape)
    if len(shape) != 3 or shape[2] != dim or shape[1] == 0:
        raise InputError(f"expected sequences of shape (batch, n, {dim}), got {shape}")
    if sequences.dtype != torch.float64:
        raise InputError(f"expected float64 sequences, got {sequences.dtype}: use .double()")
    return finite(sequences)


def finite(sequences: Tensor) -> Tensor:
    """The question itself, unless no oracle could answer it."""
    if not _finite(sequences):
        raise NotFinite
    return sequences


def _finite(values: Tensor) -> bool:
    # min and max propagate NaN and show infinity, in one pass and without a mask as big as the
    # batch: this check stands in front of every query.
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def ask(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Put a batch of questions and check the answers; every attack asks through here.

    Whatever the oracle does wrong (an exception, NaN, another length) becomes an OracleError.
    """
    count = sequences.shape[0]
    try:
        answers = cast("object", oracle(sequences))
    except KeyholeError:
        raise
    except Exception as error:  # an oracle is somebody else's code: anything may come out of it
        what = " ".join(str(error).split())[:200]
        raise OracleError(
            f"the oracle failed on {count} questions of shape {tuple(sequences.shape[1:])}: "
            f"{type(error).__name__}: {what}"
        ) from error
    if not isinstance(answers, Tensor):
        raise OracleError(f"expected a tensor of {count} answers, got {type(answers).__name__}")
    if answers.ndim == 0 or answers.shape[0] != count or answers.numel() == 0:
        got = tuple(answers.shape)
        raise OracleError(f"expected {count} answers (one per sequence), got shape {got}")
    if not answers.is_floating_point():
        raise OracleError(f"expected real answers, got {answers.dtype}")
    answers = answers.detach().to(torch.float64)
    if not _finite(answers):
        bad = int((~torch.isfinite(answers)).reshape(count, -1).any(1).sum())
        raise OracleError(f"NaN or infinity in {bad} of {count} answers", answers)
    return answers


def layers(oracle: object) -> Iterator[Any]:
    """An oracle and what it wraps, from the outside in."""
    layer: Any = oracle
    while layer is not None:
        yield layer
        layer = getattr(layer, "inner", None)


def identity_of(oracle: Oracle) -> str:
    """A name that two oracles share only if they are the same target.

    `oracle.identity` where there is one; otherwise the type's name and a digest of every tensor
    that the object (or the closure of a function) holds.
    """
    named = getattr(oracle, "identity", None)
    if isinstance(named, str):
        return named
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _tensors(oracle):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    kind = getattr(oracle, "__qualname__", type(oracle).__qualname__)
    return f"{kind}:dim={oracle.dim}:{digest.hexdigest()}"


def _tensors(oracle: object) -> Iterator[tuple[str, Tensor]]:
    state: dict[str, Any] = dict(vars(oracle)) if hasattr(oracle, "__dict__") else {}
    if isinstance(oracle, torch.nn.Module):
        state |= oracle.state_dict()
    for number, cell in enumerate(getattr(oracle, "__closure__", None) or ()):
        state[f"closure {number}"] = cell.cell_contents
    for name in sorted(state):
        value = state[name]
        items = cast("list[Any]", value if isinstance(value, list | tuple) else [value])
        for item in items:
            if isinstance(item, Tensor):
                yield name, item
            elif type(item).__module__ == "numpy" and hasattr(item, "dtype"):
                yield name, torch.as_tensor(item)


class Counted:
    """Counts every sequence that reaches `inner`; past `budget` it raises BudgetExhausted.

    A batch that overruns the budget is asked up to its end, and the answers travel with the
    exception: what was paid for is not thrown away.

    `progress` is called with the count after every batch.

    `Ledger(Counted(o))` counts what was paid, since remembered answers never reach the counter;
    `Counted(Ledger(o))` counts what was asked.
    """

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if budget is not None and budget < 0:
            raise InputError(f"a budget must be 0 queries or more, not {budget}")
        self.inner = inner
        self.budget = budget
        self.queries = 0
        self._progress = progress

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def identity(self) -> str:
        return identity_of(self.inner)

    def __call__(self, sequences: Tensor) -> Tensor:
        left = len(sequences) if self.budget is None else self.budget - self.queries
        if self.budget is not None and left < len(sequences):
            raise BudgetExhausted(self.budget, self._put(sequences[:left]) if left else None)
        return self._put(sequences)

    def _put(self, sequences: Tensor) -> Tensor:
        self.queries += len(sequences)  # before the call: a question that fails was still asked
        try:
            return ask(self.inner, sequences)
        except BudgetExhausted as end:  # a budget further in: the rest never left this machine
            self.queries -= len(sequences) - (0 if end.answers is None else len(end.answers))
            raise
        finally:
            self._progress(self.queries)
