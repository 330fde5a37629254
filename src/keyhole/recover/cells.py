"""What a store may say of how a vector's numbers were rounded: checked where it comes in."""

from __future__ import annotations

from torch import Tensor

from keyhole.core.errors import InputError


def expect_cells(
    values: Tensor,
    width: int | None,
    steps: Tensor | None,
    ends: Tensor | None,
    codebook: Tensor | None,
) -> None:
    """Refuse what does not go with a vector (d,)."""
    if width not in (None, len(values)):
        raise InputError(f"expected {width} numbers, the width that is stated, got {len(values)}")
    if steps is not None and codebook is not None:
        raise InputError("expected steps or a codebook, got both")
    if steps is not None and steps.shape != values.shape:
        raise InputError(f"expected {len(values)} steps, got {tuple(steps.shape)}")
    if ends is not None and (steps is None or ends.shape != (2, len(values))):
        raise InputError(f"expected steps and 2 × {len(values)} ends, got {tuple(ends.shape)}")
    for name, tensor in (("steps", steps), ("ends", ends), ("codebook", codebook)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise InputError(f"expected finite numbers in {name}, got others")
    if steps is not None and bool((steps < 0).any()):
        raise InputError("expected steps of 0 or more, got negative ones")
    if codebook is not None and (
        codebook.ndim != 3 or codebook.shape[0] * codebook.shape[2] != len(values)
    ):
        raise InputError(
            f"expected a codebook of (blocks, codes, numbers) for {len(values)} numbers, "
            f"got {tuple(codebook.shape)}"
        )
