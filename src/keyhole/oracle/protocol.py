"""The oracle protocol: all that a black-box attack may ask, the function that asks, and counting.

An oracle is any callable with `.dim` that maps sequences (batch, n, dim) in float64 to
answers: (batch,) scores, (batch, m) the last token's vectors, or (batch, n, m) a vector
for every token.
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

    If part of a batch was answered, `answers` holds it, so that a ledger can keep that
    part.
    """

    def __init__(self, message: str, answers: Tensor | None = None) -> None:
        super().__init__(message)
        self.answers = answers


class NotFinite(InputError):
    """A question holds NaN or infinity, which is the caller's mistake and not the oracle's."""

    def __init__(self) -> None:
        super().__init__("the sequences hold NaN or infinity")


class BudgetExhausted(KeyholeError):
    """No queries are left. `answers` holds the part of the batch that was still paid for."""

    def __init__(self, budget: int, answers: Tensor | None = None) -> None:
        super().__init__(f"the budget of {budget:,} queries is spent")
        self.budget = budget
        self.answers = answers


def check_sequences(sequences: object, dim: int) -> Tensor:
    """Return the sequences, or raise InputError if no target can answer them."""
    if not isinstance(sequences, Tensor):
        raise InputError(
            f"expected a torch tensor of sequences, got {type(sequences).__name__}"
        )
    shape = tuple(sequences.shape)
    if len(shape) != 3 or shape[2] != dim or shape[1] == 0:
        raise InputError(f"expected sequences of shape (batch, n, {dim}), got {shape}")
    if sequences.dtype != torch.float64:
        raise InputError(
            f"expected float64 sequences, got {sequences.dtype}: use .double()"
        )
    return finite(sequences)


def finite(sequences: Tensor) -> Tensor:
    """Return the sequences, or raise NotFinite if they hold NaN or infinity."""
    if not _is_finite(sequences):
        raise NotFinite
    return sequences


def expect_finite_answers(answers: Tensor, source: str = "") -> Tensor:
    """Return the answers, or raise OracleError if some hold NaN or infinity."""
    if not _is_finite(answers):
        count = len(answers)
        bad = int((~torch.isfinite(answers)).reshape(count, -1).any(1).sum())
        raise OracleError(
            f"NaN or infinity in {bad} of {count} answers{source}", answers
        )
    return answers


def _is_finite(values: Tensor) -> bool:
    # This check precedes every query. min and max propagate NaN and infinity in one
    # pass, without a mask as large as the batch.
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def ask(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Ask a batch of questions and check the answers; every attack asks through this function.

    Whatever the oracle does wrong (an exception, NaN, a wrong shape) becomes an
    OracleError.
    """
    count = sequences.shape[0]
    try:
        answers = cast("object", oracle(sequences))
    except KeyholeError:
        raise
    except Exception as error:  # an oracle is foreign code, which may raise anything
        why = " ".join(str(error).split())[:200]
        raise OracleError(
            f"the oracle failed on {count} questions of shape {tuple(sequences.shape[1:])}: "
            f"{type(error).__name__}: {why}"
        ) from error
    if not isinstance(answers, Tensor):
        raise OracleError(
            f"expected a tensor of {count} answers, got {type(answers).__name__}"
        )
    if answers.ndim == 0 or answers.shape[0] != count or answers.numel() == 0:
        got = tuple(answers.shape)
        raise OracleError(
            f"expected {count} answers (one per sequence), got shape {got}"
        )
    if not answers.is_floating_point():
        raise OracleError(f"expected real answers, got {answers.dtype}")
    return expect_finite_answers(answers.detach().to(torch.float64))


def layers(oracle: object) -> Iterator[Any]:
    """Yield an oracle, the oracle that it wraps, and so on inwards."""
    layer: Any = oracle
    while layer is not None:
        yield layer
        layer = getattr(layer, "inner", None)


def stated(oracle: object, name: str) -> Any:
    """Return the attribute `name` of an oracle, or of the first inside it that has one."""
    values = (getattr(layer, name, None) for layer in layers(oracle))
    return next((value for value in values if value is not None), None)


def identity_of(oracle: Oracle) -> str:
    """Return a name that two oracles share only if they are the same target.

    That is `oracle.identity` if it exists. Otherwise it consists of the type's name and
    a digest of every tensor that the object (or the closure of a function) holds.
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
    """Yield the tensors and NumPy arrays that an object holds, by name."""
    state: dict[str, Any] = dict(vars(oracle)) if hasattr(oracle, "__dict__") else {}
    if isinstance(oracle, torch.nn.Module):
        state |= oracle.state_dict()
    for number, cell in enumerate(getattr(oracle, "__closure__", None) or ()):
        state[f"closure {number}"] = cell.cell_contents
    for name in sorted(state):
        value = state[name]
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Tensor):
                yield name, item
            elif type(item).__module__ == "numpy" and hasattr(item, "dtype"):
                yield name, torch.as_tensor(item)


class Wrapper:
    """An oracle around the oracle `inner`; `change` names what it does to answers, if anything."""

    def __init__(self, inner: Oracle, change: str = "") -> None:
        self.inner = inner
        self._change = change

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def identity(self) -> str:
        name = identity_of(self.inner)
        return f"{name}|{self._change}" if self._change else name


class Counted(Wrapper):
    """Counts every sequence that reaches `inner` and raises BudgetExhausted beyond `budget`.

    A batch that exceeds the budget is asked as far as the budget allows, and the
    exception carries these answers. `progress` is called with the count after every
    batch.

    `Ledger(Counted(o))` counts what was paid for, since remembered answers never reach
    the counter; `Counted(Ledger(o))` counts what was asked.
    """

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if budget is not None and budget < 0:
            raise InputError(f"a budget must be 0 queries or more, not {budget}")
        super().__init__(inner)
        self.budget = budget
        self.queries = 0
        self._progress = progress

    def __call__(self, sequences: Tensor) -> Tensor:
        if self.budget is None or self.queries + len(sequences) <= self.budget:
            return self._ask(sequences)
        left = self.budget - self.queries
        raise BudgetExhausted(
            self.budget, self._ask(sequences[:left]) if left else None
        )

    def _ask(self, sequences: Tensor) -> Tensor:
        # Before the call: a question that fails was still asked.
        self.queries += len(sequences)
        try:
            return ask(self.inner, sequences)
        except BudgetExhausted as end:  # of an inner counter: it did not ask the rest
            self.queries -= len(sequences)
            if end.answers is not None:
                self.queries += len(end.answers)
            raise
        finally:
            self._progress(self.queries)
