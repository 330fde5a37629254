"""The last layer of a language model alone: logits of a final state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keyhole.oracle.planted import Parametric
from keyhole.oracle.protocol import check_sequences


@dataclass(frozen=True, eq=False)
class OutputMatrix(Parametric):
    """`W h` for the last state h of a sequence; row i of W is that of the token `tokens[i]`.

    An extraction knows W up to an invertible matrix on its right (and, from log-probabilities, up
    to a row that is added to all rows): its columns are an orthonormal basis of what they span.
    With `constant` the last of them is the direction of what all answers share, an output bias or
    that of the final norm, beyond those in which answers differ. `blocks` of them are none of the
    model's: see `width`.
    """

    W: Tensor
    tokens: Tensor
    constant: bool = False
    blocks: int = 0
    kind = "output-layer"

    def __post_init__(self) -> None:
        self._require("W", self.W, None, None)
        self._require("tokens", self.tokens, len(self.W))

    @property
    def dim(self) -> int:
        return self.W.shape[1]

    @property
    def width(self) -> int:
        """The width of the model that gives answers of this rank: of the two that do, the even one.

        States behind an RMSNorm span as many dimensions r as they have numbers, behind a LayerNorm
        one less; what all answers share adds one. So r is the width of an RMSNorm without and of a
        LayerNorm with an output bias or a bias of its own; otherwise it is r − 1 (RMSNorm) or r + 1
        (LayerNorm). The pairs give the same answers, so no question tells them apart; but heads
        share the width out among them, and no model has an odd one.

        llama.cpp multiplies a matrix in Q4_1 or Q5_1 by states in blocks of 32 numbers, and the
        least weight of a block by their sum, which it keeps apart and in float16: one direction
        more for each block.
        """
        rank = self.dim - self.blocks
        if rank % 2 == 0:
            return rank
        return rank - 1 if self.constant else rank + 1

    def tensors(self) -> dict[str, Tensor]:
        return {"W": self.W, "tokens": self.tokens}

    def flags(self) -> dict[str, str]:
        return {"constant": str(self.constant), "blocks": str(self.blocks)}

    def __call__(self, sequences: Tensor) -> Tensor:
        return check_sequences(sequences, self.dim)[:, -1] @ self.W.mT

    def outside(self, answers: Tensor) -> Tensor:
        """What no state explains of answers (b, tokens), centred where W is: zero for its own."""
        return answers - (answers @ self.W) @ self.W.mT
