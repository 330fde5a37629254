"""What is known of a last layer, in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LastLayer:
    """The rank of a last layer's answers, the width that follows, and how exactly it is known.

    `above` and `below` are the last singular value that counts and the first that does not. Without
    a cliff between them `width` is None, and `rank` what it has at least. `decimals` are the digits
    that answers were rounded to, None where they were not. `tokens` of the `vocabulary` have their
    row of the matrix. `stated` is the width that the server itself claims.

    `rms` is beside the true matrix, where one was given: of the difference that the best linear map
    leaves, and `relative` to the matrix's own. `tied` says that it is the table of inputs too.
    """

    rank: int
    width: int | None
    constant: bool
    blocks: int
    log_probabilities: bool
    above: float
    below: float
    decimals: int | None
    tokens: int
    vocabulary: int
    stated: int | None = None
    rms: float | None = None
    relative: float | None = None
    tied: bool | None = None

    def __str__(self) -> str:
        if self.width is None:
            claimed = "" if self.stated is None else f", of {self.stated:,} that the server states"
            return f"{self.rank:,} directions or more{claimed}: no cliff yet"
        words = (
            f"width {self.width:,}: {self.rank:,} singular values down to {self.above:.1e}, "
            f"then {self.below:.1e}; {self._norm()}; {self.tokens:,} of {self.vocabulary:,} rows "
            f"of the matrix, up to an invertible {self.rank:,} × {self.rank:,} matrix"
        )
        if self.log_probabilities:
            words += " and a row added to all of them"
        if self.decimals is not None:
            words += f"; answers rounded to {self.decimals} digits"
        if self.rms is not None and self.relative is not None:
            words += (
                f"; {self.rms:.1e} RMS from the true matrix after the best linear map, "
                f"{self.relative:.1e} of its own"
            )
        return words + ("; it is the table of input embeddings too" if self.tied else "")

    def _norm(self) -> str:
        """What the constant says of the layer's biases; see OutputMatrix.width for why."""
        rank = self.rank - self.blocks
        blocks = f"; {self.blocks} of them from a matrix in blocks of 32" if self.blocks else ""
        if self.constant:
            likely = "a LayerNorm with biases" if rank == self.width else "an output bias"
            return f"answers share a constant ({likely}){blocks}"
        likely = "an RMSNorm" if rank == self.width else "a LayerNorm without biases"
        return f"no constant, so no biases ({likely}){blocks}"
