"""`keyhole extract` as a function: open a target, choose a method, ask, judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from keyhole.bounds import expect_count
from keyhole.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.last_layer.reference import compared
from keyhole.extract.orthogonal_heads import load_bases
from keyhole.extract.output_layer import OutputLayer
from keyhole.extract.registry import METHODS
from keyhole.models.demo import open_model
from keyhole.models.loading import names_model
from keyhole.models.next_token import NextTokenLogits
from keyhole.oracle.completions import Completions
from keyhole.oracle.counted import Counted
from keyhole.oracle.probe import expect_authorized
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.session import session
from keyhole.oracle.target import open_target
from keyhole.oracle.token_questions import Logits
from keyhole.progress import Track, untracked


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
    top: int | None = None,
    tokens: int | None = None,
    reference: str | Path | None = None,
    authorized: bool = False,
    budget: int | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
) -> Extraction:
    """Read the weights of a target back from its answers.

    `target` is what the command line takes (a .safetensors file, an address, `demo`, for its last
    layer a language model or a server of one) or any oracle;
    `method` a name of the registry or a method with hyperparameters of your own. `rank` to `tokens`
    are for the named methods that have them; given with another they are refused. `bases` are
    matrices, or a .safetensors file that holds one for each head. `reference` is a model's file or
    folder, beside whose last layer the stolen one is held; `authorized` says that a server which is
    not this machine may be asked. `budget` is the most
    queries to ask; `ledger` the file that remembers every answer, from which a run that was
    stopped goes on.
    """
    expect_count("a budget", budget, 0)
    options = {
        "rank": rank, "answer_error": answer_error, "max_norm": max_norm, "accuracy": accuracy,
        "values": values, "bound": bound, "margin": margin, "repeats": repeats,
        "bases": load_bases(bases) if isinstance(bases, str | Path) else bases,
        "oversampling": oversampling, "heads": heads, "top": top, "tokens": tokens,
    }  # fmt: skip
    if method == "auto" and isinstance(target, str) and _names_language_model(target):
        method = "output-layer"
    if isinstance(method, str):
        name = method
        method = METHODS.make(name, **options, seed=seed)
    else:
        name = type(method).__name__
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise InputError(f"expected {given[0]} as a field of the {name} given, got it apart")
    if reference is not None and not isinstance(method, OutputLayer):
        raise InputError(f"expected --reference with output-layer, got {name}")
    oracle = _opened(target, method, authorized=authorized) if isinstance(target, str) else target
    with session({"": oracle}, budget=budget, ledger=ledger) as surfaces:
        ready = surfaces[""]
        progress = track("extract", method.expected(ready.dim))
        progress(0, note=name)
        result = method(Counted(ready, progress=progress))
    return result if reference is None else compared(result, reference)


def _names_language_model(name: str) -> bool:
    """A server of a language model, or one of its routes, or a model that is opened here."""
    if name.startswith(("http://", "https://")):
        return "/v2/models/" not in name
    return names_model(name)


def _opened(name: str, method: Method, *, authorized: bool) -> Oracle:
    if not isinstance(method, OutputLayer):
        return open_target(name)
    if not _names_language_model(name):
        raise InputError(
            "expected a language model for output-layer: http://host:port, a folder, a .gguf file "
            f"or a hub name, got {name}"
        )
    if name.startswith(("http://", "https://")):
        expect_authorized(name, authorized)
        return Completions.at(name)
    return Logits(NextTokenLogits(open_model(name, task="causal")))
