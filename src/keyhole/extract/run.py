"""`keyhole extract` as a function: open a target, choose a method, ask, judge."""

from __future__ import annotations

from pathlib import Path

from keyhole.bounds import expect_count
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.registry import METHODS
from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.session import session
from keyhole.oracle.target import open_target
from keyhole.progress import Track, untracked


def run(
    target: str | Oracle,
    method: str | Method = "auto",
    *,
    rank: int | None = None,
    answer_error: float | None = None,
    max_norm: float | None = None,
    budget: int | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
) -> Extraction:
    """Read the weights of a target back from its answers.

    `target` is what the command line takes (a .safetensors file, an address, `demo`) or any oracle;
    `method` a name of the registry or a method with hyperparameters of your own. `rank`,
    `answer_error` and `max_norm` are for the named methods that have them. `budget` is the most
    queries to ask; `ledger` the file that remembers every answer, from which a run that was
    stopped goes on.
    """
    expect_count("a budget", budget, 0)
    if isinstance(method, str):
        name = method
        method = METHODS.make(
            name, rank=rank, answer_error=answer_error, max_norm=max_norm, seed=seed
        )
    else:
        name = type(method).__name__
    oracle = open_target(target) if isinstance(target, str) else target
    with session({"": oracle}, budget=budget, ledger=ledger) as surfaces:
        ready = surfaces[""]
        progress = track("extract", method.expected(ready.dim))
        progress(0, note=name)
        return method(Counted(ready, progress=progress))
