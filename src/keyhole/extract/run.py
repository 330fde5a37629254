"""`keyhole extract` as a function: open a target, choose a method, ask, judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from keyhole.bounds import expect_count
from keyhole.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.orthogonal_heads import load_bases
from keyhole.extract.registry import METHODS
from keyhole.models.demo import folder_of, open_model
from keyhole.models.loading import task_of
from keyhole.models.sub_layer import sub_layer
from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.session import session
from keyhole.oracle.target import open_target
from keyhole.progress import Track, untracked

_OF_A_MODEL = ":attention."


def run(
    target: str | Oracle,
    method: str | Method = "auto",
    *,
    rank: int | None = None,
    answer_error: float | None = None,
    max_norm: float | None = None,
    accuracy: float | None = None,
    values: str | None = None,
    bound: float | None = None,
    margin: float | None = None,
    repeats: int | None = None,
    bases: str | Path | Sequence[Tensor] | None = None,
    oversampling: float | None = None,
    heads: int | None = None,
    budget: int | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
) -> Extraction:
    """Read the weights of a target back from its answers.

    `target` is what the command line takes (a .safetensors file, an address, `demo`,
    `MODEL:attention.LAYER`, `MODEL:attention.LAYER+residual`) or any oracle;
    `method` a name of the registry or a method with hyperparameters of your own. `rank` to `heads`
    are for the named methods that have them; given with another they are refused. `bases` are
    matrices, or a .safetensors file that holds one for each head. `budget` is the most
    queries to ask; `ledger` the file that remembers every answer, from which a run that was
    stopped goes on.
    """
    expect_count("a budget", budget, 0)
    options = {
        "rank": rank, "answer_error": answer_error, "max_norm": max_norm, "accuracy": accuracy,
        "values": values, "bound": bound, "margin": margin, "repeats": repeats,
        "bases": load_bases(bases) if isinstance(bases, str | Path) else bases,
        "oversampling": oversampling, "heads": heads,
    }  # fmt: skip
    if method == "auto" and isinstance(target, str) and _OF_A_MODEL in target:
        method = "attention-sub-layer"  # the name says what it is
    if isinstance(method, str):
        name = method
        method = METHODS.make(name, **options, seed=seed)
    else:
        name = type(method).__name__
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise InputError(f"expected {given[0]} as a field of the {name} given, got it apart")
    oracle = _opened(target) if isinstance(target, str) else target
    with session({"": oracle}, budget=budget, ledger=ledger) as surfaces:
        ready = surfaces[""]
        progress = track("extract", method.expected(ready.dim))
        progress(0, note=name)
        return method(Counted(ready, progress=progress))


def _opened(target: str) -> Oracle:
    """An endpoint, or the attention of one block of a model."""
    model, mark, part = target.rpartition(_OF_A_MODEL)
    if not mark:
        return open_target(target)
    layer, plus, added = part.partition("+")
    if not layer.isdecimal() or (plus and added != "residual"):
        raise InputError(
            f"expected MODEL:attention.LAYER or MODEL:attention.LAYER+residual, got {target}"
        )
    loaded = open_model(model, task_of(folder_of(model)))
    return sub_layer(loaded.model, int(layer), residual=bool(plus))
