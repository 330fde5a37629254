"""llama.cpp's own numbers of a quantised model against ours, and its last layer from its answers.

`--models FILE.gguf`: xllamacpp serves it on this machine. Turns of DREAM's dialogues of 8 to 40
tokens are sent as token ids; back come the last states (pooling none) and a saved slot, the keys
and values of all layers. `parts`:

- `apart`: how far its last states and its values of every layer are from ours in float32, from ours
  with what goes into every matrix rounded as ggml rounds it, and from its own without flash
  attention, which is what rounding in another order does to llama.cpp itself;
- `last-layer`, only where it is named: the width of the model and rows of its output matrix from
  the best `--top` log-probabilities with a bias, and what that takes in queries. `--servers` of
  them, of one file, share the questions.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
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
from keyhole.extract.token_answers import compared, true_matrix
from keyhole.models import Loaded, anatomy, load_model
from keyhole.models.capture import eight_bit_activations
from keyhole.oracle.completions import Completions
from keyhole.recover.files.arrays import arrays_of_slot, read_slot
from keyhole.recover.files.readings import readings_of
from servers import served
from show import Row


@dataclass(frozen=True, eq=False)
class Given:
    """Of one text: its ids, the last states (n, d), and the cache of each layer by its number."""

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
    threads: int = 1,
    servers: int = 1,
) -> Iterator[Row]:
    if quick:  # no server: our own rounding stands in for it
        loaded = subjects.tiny("llama")
        ids = [each.tolist() for each in subjects.tiny_texts(2, 8, framed=False)]
        given = [own(loaded, each, rounded=True) for each in ids]
        yield row_of("random llama, its rounding against float32", given, plainly(loaded, given))
        return
    for path in models:
        for count in top if "last-layer" in parts else ():
            yield last_layer(path, count, threads, servers)
        if "apart" in parts:
            loaded = load_model(path)
            lines = subjects.turns(data, "dev")
            random.Random(0).shuffle(lines)
            ids = [each.tolist() for each in subjects.encoded(loaded, lines[: 20 * texts])]
            ids = [each for each in ids if 8 <= len(each) <= 40][:texts]
            yield from apart(path, loaded, answers(path, loaded, ids))


class Several:
    """Servers of one file as one oracle: each answers its share of the questions."""

    def __init__(self, servers: list[Completions]) -> None:
        self.servers = servers
        self.dim, self.vocabulary = servers[0].dim, servers[0].vocabulary
        self.pool = ThreadPoolExecutor(len(servers))
        self.asked, self.said, self.started = 0, 0.0, time.perf_counter()

    def __call__(self, sequences: Tensor) -> Tensor:
        shares = [rows for rows in sequences.tensor_split(len(self.servers)) if len(rows)]
        answers = torch.cat(list(self.pool.map(lambda ask, x: ask(x), self.servers, shares)))
        self.asked, seconds = self.asked + len(sequences), time.perf_counter() - self.started
        if seconds > self.said + 10:
            self.said = seconds
            print(f"{self.asked:,} queries, {seconds:.0f} s", file=sys.stderr, flush=True)
        return answers


def last_layer(path: Path, top: int, threads: int, servers: int) -> Row:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(path, f"threads={threads}")) for _ in range(servers)]
        oracle = Several([stack.enter_context(closing(Completions.at(url))) for url in urls])
        found, seconds = show.timed(lambda: OutputLayer(top=top)(oracle))
    truth = int(true_matrix(path)[0].shape[1])
    result = compared(found, path)
    checked = 0 if result.check is None else result.check.queries
    layer = result.layer
    row = Row(
        f"{path.stem}, last layer from the best {top} with a bias",
        f"width {result.width}, {result.queries + checked:,} queries", f"width {truth}",
        result.width == truth,
        f"{result.reason}; {seconds:.0f} s",
    )  # fmt: skip
    return show.itemised(row, [{
        "top": top, "width": result.width, "queries": result.queries, "judge": checked,
        "status": str(result.status), "seconds": seconds, "layer": layer and vars(layer),
    }])  # fmt: skip


def answers(path: Path, loaded: Loaded, ids: list[list[int]], *settings: str) -> list[Given]:
    """What llama.cpp's server gives for texts."""
    parts, caches, states = anatomy(loaded.model), list[Any](), list[Tensor]()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(path, f"slots={folder}/", *settings) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        for text in ids:
            asked = {"prompt": text, "n_predict": 1, "temperature": 0, "cache_prompt": False}
            client.post("/completion", json=asked).raise_for_status()
            saved = client.post("/slots/0?action=save", json={"filename": "slot.bin"})
            saved.raise_for_status()
            slot = read_slot(Path(folder) / "slot.bin")
            (sections,) = readings_of(arrays_of_slot(slot), parts, None)[0]
            caches.append({
                section.layer: {
                    name: rows[0, :, : len(text)].float() for name, rows in section.tensors.items()
                }
                for section in sections
            })  # fmt: skip
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
        "float32": plainly(loaded, given),
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
        layer: mean(off(a.caches[layer]["values"], b.caches[layer]["values"]) for a, b in pairs)
        for layer in sorted(given[0].caches)
    }
    shown = ", ".join(f"{layer}: {layers[layer]:.1e}" for layer in list(layers)[:4])
    row = Row(
        what, f"last states {states:.1e} apart, values {max(layers.values()):.1e} at most",
        details=f"values of layers {shown}; relative, mean of {len(given)} texts",
    )  # fmt: skip
    return show.itemised(row, [{"states": states, "values": list(layers.values())}])


def plainly(loaded: Loaded, given: list[Given]) -> list[Given]:
    return [own(loaded, each.ids) for each in given]


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


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


if __name__ == "__main__":
    show.main(run)
