"""A share as people read it, in one way everywhere: "all" and "nothing" are never rounded to."""

from __future__ import annotations


def percent(share: float, decimals: int = 0) -> str:
    """0.888 is "89%" or "88.8%"; 0.999 is ">99%" and 0.001 "<1%": neither all nor nothing."""
    step = 10.0**-decimals
    written = f"{share:.{decimals}%}"
    if share < 1 and written == f"{100:.{decimals}f}%":
        return f">{100 - step:.{decimals}f}%"
    if share > 0 and written == f"{0:.{decimals}f}%":
        return f"<{step:.{decimals}f}%"
    return written
