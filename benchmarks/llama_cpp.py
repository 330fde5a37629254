"""llama.cpp's states of a quantised model compared with ours, and its last layer from its answers.

xllamacpp serves each of `--models FILE.gguf` on this machine. Turns of DREAM's
dialogues of 8 to 40 tokens are sent as token ids; the server returns the last states
(pooling none) and a saved slot, which holds the keys and values of all layers.
`--parts` selects:

    apart       how far its last states and the values of every layer are from ours in float32, from
                ours with the inputs of every matrix rounded as ggml does it, and from
                its own without flash attention (the effect of another order of
                rounding)
    last-layer  the width of the model and rows of its output matrix, from the best `--top`
                log-probabilities with a bias, and the queries that this takes
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import torch
from torch import Tensor

import show
import subjects
from keyhole.extract import OutputLayer
from keyhole.extract.output_layer import compared, true_matrix
from keyhole.models import Loaded, anatomy, load_model
from keyhole.models.capture import eight_bit_activations
from keyhole.oracle.completions import Completions
from keyhole.recover.files.arrays import arrays_of_slot, read_slot
from keyhole.recover.files.readings import readings_of
from servers import served
from show import Row


@dataclass(frozen=True, eq=False)
class Given:
    """One text: its ids, the last states (n, d), and the cache of each layer by its number."""

    ids: list[int]
    states: Tensor
    caches: dict[int, dict[str, Tensor]]


def run(
    quick: bool,
    data: Path = subjects.DATA,
    models: list[Path] = [],  # noqa: B006 - read, never changed
    parts: list[str] = ["apart"],  # noqa: B006
    texts: int = 10,
    top: list[int] = [20],  # noqa: B006
) -> Iterator[Row]:
    if quick:  # without a server: our own rounding takes its place
        loaded = subjects.tiny("llama")
        ids = [each.tolist() for each in subjects.tiny_texts(2, 8, framed=False)]
        given = [own(loaded, each, rounded=True) for each in ids]
        plain = [own(loaded, each) for each in ids]
        yield row_of("random llama, its rounding against float32", given, plain)
        return
    for path in models:
        for count in top if "last-layer" in parts else ():
            yield last_layer(path, count)
        if "apart" in parts:
            loaded = load_model(path)
            ids = [each.tolist() for each in subjects.short_turns(data, loaded, texts)]
            yield from apart(path, loaded, answers(path, loaded, ids))


def last_layer(path: Path, top: int) -> Row:
    with served(path) as url, closing(Completions.at(url)) as oracle:
        found, seconds = show.timed(lambda: OutputLayer(top=top)(oracle))
    truth = int(true_matrix(path)[0].shape[1])
    result = compared(found, path)
    checked = 0 if result.check is None else result.check.queries
    item = {
        "top": top,
        "width": result.width,
        "queries": result.queries,
        "judge": checked,
        "status": str(result.status),
        "seconds": seconds,
        "layer": result.layer and vars(result.layer),
    }
    return Row(
        f"{path.stem}, last layer from the best {top} with a bias",
        f"width {result.width}, {result.queries + checked:,} queries",
        f"width {truth}",
        result.width == truth,
        f"{result.reason}; {seconds:.0f} s",
        items=[item],
    )


def answers(
    path: Path, loaded: Loaded, ids: list[list[int]], *settings: str
) -> list[Given]:
    """Return the states and caches of llama.cpp's server for texts."""
    parts = anatomy(loaded.model)
    caches = list[Any]()
    states = list[Tensor]()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(path, f"slots={folder}/", *settings) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        for text in ids:
            request = {
                "prompt": text,
                "n_predict": 1,
                "temperature": 0,
                "cache_prompt": False,
            }
            client.post("/completion", json=request).raise_for_status()
            saved = client.post("/slots/0?action=save", json={"filename": "slot.bin"})
            saved.raise_for_status()
            slot = read_slot(Path(folder) / "slot.bin")
            (sections,) = readings_of(arrays_of_slot(slot), parts, None)[0]
            caches.append(
                {
                    section.layer: {
                        name: rows[0, :, : len(text)].float()
                        for name, rows in section.tensors.items()
                    }
                    for section in sections
                }
            )
    with (
        served(path, "pooling=NONE", *settings) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        for text in ids:
            answer = client.post("/embeddings", json={"content": text}).json()
            states.append(torch.tensor(answer[0]["embedding"]))
    return [Given(*each) for each in zip(ids, states, caches, strict=True)]


def apart(path: Path, loaded: Loaded, given: list[Given]) -> Iterator[Row]:
    sides = {
        "float32": [own(loaded, each.ids) for each in given],
        "the same rounding": [own(loaded, each.ids, rounded=True) for each in given],
        "llama.cpp without flash attention": answers(
            path, loaded, [each.ids for each in given], "flash=0"
        ),
    }
    for name, others in sides.items():
        yield row_of(f"{path.stem}, llama.cpp against {name}", given, others)


def row_of(what: str, given: list[Given], others: list[Given]) -> Row:
    pairs = list(zip(given, others, strict=True))
    states = mean(off(a.states, b.states) for a, b in pairs)
    layers = {
        layer: mean(
            off(a.caches[layer]["values"], b.caches[layer]["values"]) for a, b in pairs
        )
        for layer in sorted(given[0].caches)
    }
    shown = ", ".join(f"{layer}: {layers[layer]:.1e}" for layer in list(layers)[:4])
    return Row(
        what,
        f"last states {states:.1e} apart, values {max(layers.values()):.1e} at most",
        details=f"values of layers {shown}; relative, mean of {len(given)} texts",
        items=[{"states": states, "values": list(layers.values())}],
    )


@torch.no_grad()
def own(loaded: Loaded, ids: list[int], *, rounded: bool = False) -> Given:
    parts = anatomy(loaded.model)
    with eight_bit_activations(loaded.model) if rounded else nullcontext():
        out = parts.base(input_ids=torch.tensor([ids]), use_cache=True)
    caches = {
        number: {"keys": layer.keys[0], "values": layer.values[0]}
        for number, layer in enumerate(out.past_key_values.layers)
    }
    return Given(ids, out.last_hidden_state[0], caches)


def off(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / first.norm())


if __name__ == "__main__":
    show.main(run)
