"""What a model is worth before and after: clean accuracy, and the share of right answers that flip.

Accuracy is over all examples; flips cost hundreds of passes each, so they are over the first few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import no_grad

from keyhole.data import Example, encode
from keyhole.disrupt import HackAttend
from keyhole.disrupt.disruption import Disruption, joined
from keyhole.errors import InputError
from keyhole.models.loading import Loaded

_TOGETHER = 16


@dataclass(frozen=True)
class Measured:
    """`accuracy` over `examples`; `success` of the attack over the `attacked`, all once right."""

    accuracy: float
    examples: int
    success: float
    attacked: int
    share: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    loaded: Loaded,
    examples: Sequence[Example],
    *,
    method: HackAttend | None = None,
    flips: int = 50,
    longest: int | None = 128,
    watch: Callable[[int, int], None] | None = None,
) -> Measured:
    """Clean accuracy, and how many of the first `flips` examples can be flipped at 1%."""
    if not examples or flips < 1:
        raise InputError("expected one example or more to measure on, got none")
    method = method or HackAttend()
    model, right, parts = loaded.model, 0, list[Disruption]()
    for start in range(0, len(examples), _TOGETHER):
        some = examples[start : start + _TOGETHER]
        batch, labels = encode(loaded.tokenizer, some, longest=longest)
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        inputs.pop("special_tokens_mask")
        with no_grad():
            right += int((model(**inputs).logits.argmax(-1).cpu() == labels).sum())
        if start < flips:
            left = flips - start
            few = {name: value[:left] for name, value in batch.items()}
            parts.append(method(model, few, labels[:left]))
        if watch is not None:
            watch(start + len(some), len(examples))
    found = joined(parts)
    return Measured(
        right / len(examples), len(examples), found.success, len(found.attacked), method.share
    )
