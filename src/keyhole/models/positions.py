"""How many tokens of a text a model can take in: its positions, or what the caller allows."""

from __future__ import annotations

from typing import Any

from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy


def positions(model: Any) -> int | None:
    """The longest text that the model has positions for; None where it has no such limit."""
    try:
        return anatomy(model).longest
    except (InputError, AttributeError, TypeError):  # a family whose parts are not known here
        most = getattr(model.config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None


def fitting(model: Any, tokenizer: Any, longest: int | None) -> int | None:
    """Where a text is cut off: at `longest`, or where the positions end.

    Something of the text must be left beside the tokens that frame it.
    """
    most = positions(model)
    allowed = longest if most is None else min(most, most if longest is None else longest)
    frame = len(tokenizer("")["input_ids"])
    if allowed is not None and allowed <= frame:
        raise InputError(
            f"expected room for more than the {frame} tokens that frame a text, got {allowed}"
        )
    return allowed
