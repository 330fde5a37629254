"""A fleet of 12 small models on a Dask cluster: two workers against one, and one that is killed.

A real scheduler and real worker processes of one thread each on this machine. Every run audits all
models from the beginning, by the same workers, which were started and had loaded their libraries
before: with the first one alone, then with both, then with both until one of them is killed (-9)
while it has a check under way. Every check that a worker begins or ends is written down by itself.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

import show
from keyhole.audit import Member, read_fleet
from keyhole.audit.fleets import fleet
from keyhole.core import Fleet
from show import Row

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import tiny_models
from dask_workers import BEGUN, ENDED, OPENED, Workers, kill_in_the_middle, workers

MODELS = 12
LEAST = 1.7  # times as fast with two workers
SHAPES = {"bert": "AutoModelForSequenceClassification", "roberta": "AutoModel",
          "gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM"}  # fmt: skip


def models(folder: Path, quick: bool) -> Path:
    """Models of unequal families and sizes, texts for them, and the file of the fleet.

    Where it should be quick: two encoders of one layer and no head.
    """
    stream = torch.Generator().manual_seed(1)
    for number in range(2 if quick else MODELS):
        family = "roberta" if quick else list(SHAPES)[number % len(SHAPES)]
        width = 32 * (1 + number % 3)
        made = tiny_models.model(
            family, seed=number, head=SHAPES[family], hidden_size=width,
            intermediate_size=2 * width, num_hidden_layers=1 if quick else 2 + number % 2,
        )  # fmt: skip
        made.save_pretrained(folder / f"model-{number:02d}")
        tiny_models.tokenizer(family in tiny_models.DECODERS).save_pretrained(
            folder / f"model-{number:02d}"
        )
    words = torch.randint(195, (4, 14), generator=stream).tolist()
    lines = [" ".join(f"w{word}" for word in line) for line in words]
    (folder / "texts.txt").write_text("\n".join(lines))
    path = folder / "fleet.toml"
    path.write_text(
        '[defaults]\ndata = "texts.txt"\ntexts = 1\nflips = 2\n\n[[target]]\ntarget = "./model-*"\n'
    )
    return path


def timed(members: list[Member], cluster: Workers) -> tuple[Fleet, float]:
    """All of them from the beginning, as a command would, journal and all."""
    cluster.clear()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        return show.timed(lambda: fleet(members, dask=cluster.address, journal=journal))


def facts(part: object) -> object:
    """All that an audit says but for when, where and in how many seconds."""
    if isinstance(part, Fleet):
        return {name: facts(audit.to_dict()) for name, audit in part.audits.items()}
    if isinstance(part, dict):
        left = ("seconds", "created", "environment")
        return {key: facts(value) for key, value in part.items() if key not in left}
    return [facts(each) for each in part] if isinstance(part, list | tuple) else part


def run(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place, workers(Path(place)) as cluster:
        folder = Path(place, "models")
        folder.mkdir()
        members = read_fleet(models(folder, quick))
        (first,) = cluster.add()
        if not quick:
            timed(members[:1], cluster)  # libraries are loaded
        alone, with_one = timed(members, cluster)
        checks = cluster.recorded(ENDED).total()
        (second,) = cluster.add()
        if not quick:
            timed(members[:2], cluster)
        both, with_two = timed(members, cluster)
        opened = cluster.recorded(OPENED).total()
        shares = [cluster.recorded(ENDED, pid).total() for pid in (first, second)]

        cluster.clear()
        lost: set[tuple[str, str]] = set()
        killer = threading.Thread(
            target=lambda: lost.update(kill_in_the_middle(cluster, second, checks // 3))
        )
        killer.start()
        killed, after_death = timed(members, cluster)
        killer.join()
        begun, ended = cluster.recorded(BEGUN), cluster.recorded(ENDED)
    yield Row(f"{len(members)} models, {checks} checks: 1 worker", f"{with_one:.1f} s")
    details = f"{shares[0]} and {shares[1]} checks, {opened} times a model was opened"
    yield Row("2 workers", f"{with_two:.1f} s", details=details)
    ratio = with_one / with_two
    yield Row("2 workers against 1", f"{ratio:.2f} x", f">= {LEAST} x", ratio >= LEAST,
              promise=False)  # fmt: skip
    yield Row("one of 2 killed", f"{after_death:.1f} s")
    yield show.exactly("checks lost", checks - len(ended), 0)
    again = {check for check, times in begun.items() if times > 1}
    details = f"under way when it was killed: {len(lost)}"
    yield show.exactly("checks done again, none of them under way", len(again - lost), 0, details)
    same = facts(alone) == facts(both) == facts(killed)
    yield show.exactly("findings of the three runs", "the same" if same else "differ", "the same")


if __name__ == "__main__":
    show.main(run)
