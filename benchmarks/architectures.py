"""The registered attention function against eager on sixteen architectures, random small weights.

For each: the largest difference of the outputs relative to the largest output, and how many heads
have a gate with a gradient. Models that compute attention on their own must be refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import show
from keyhole.core.errors import InputError
from keyhole.models.masking import Site, Untouched, rewriting, sites_of
from show import Row

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import tiny_architectures as zoo


def run(quick: bool) -> Iterator[Row]:
    for family in ("bert", "gpt2", "t5") if quick else zoo.SIXTEEN:
        yield from against_eager(family)
    # DeBERTa's module warns of its own age when it is imported.
    for family in zoo.REFUSED[1:] if quick else zoo.REFUSED:
        yield refusal(family)


class Gates(Untouched):
    """A factor of one on every head, to be differentiated by."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def gate(self, site: Site, shape: torch.Size) -> Tensor:
        del site
        self.made.append(torch.ones(shape[1], 1, 1, requires_grad=True))
        return self.made[-1]


def against_eager(family: str) -> Iterator[Row]:
    model, given = zoo.model(family), zoo.inputs(family)
    eager = model(**given).last_hidden_state
    gates = Gates()
    with rewriting(model, gates):
        ours = model(**given).last_hidden_state
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    (ours * weights).sum().backward()
    heads = torch.cat([gate.grad.flatten() for gate in gates.made if gate.grad is not None])
    alive, total = int((heads != 0).sum()), sum(len(gate) for gate in gates.made)
    error = show.relative(ours.detach(), eager)
    yield Row(f"{family}: difference to eager", f"{error:.1e}", "0", error == 0)
    yield Row(f"{family}: heads with a gradient", f"{alive}/{total}", f"{total}", alive == total)


def refusal(family: str) -> Row:
    outcome, reason = "accepted", ""
    try:
        sites_of(zoo.model(family), **zoo.inputs(family))
    except InputError as error:
        outcome, reason = "refused", str(error)
    return show.exactly(f"{family}: computes attention on its own", outcome, "refused", reason)


if __name__ == "__main__":
    show.main(run)
