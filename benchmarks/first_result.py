"""How long people wait: for a first result, for all of it, for an error; and is the time left true?

Every row is a command as a person types it, in a process of its own, with default options; what it
writes is timed line by line. A store of 60 short sentences (turns of DREAM's dialogues) with
all-MiniLM-L6-v2, that model itself, SmolLM2 behind llama.cpp's server (xllamacpp) and in a saved
slot, the demo. Seconds are those of a clock, and judged by it; on a machine that is busy with other
things the load and the processor's seconds next to them say how much of that is Keyhole's. Time
left: what the command said about 25, 50 and 75% of its way, over what it really took from there.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import show
import subjects
from keyhole import oracle
from keyhole.models.capture import Exposure
from keyhole.recover.embeddings.pooling import embeddings
from last_layer import served, shipped
from show import Row

PARTS = ["errors", "folder", "demo", "model", "store", "embeddings", "completions", "slot"]
_UNITS = {"second": 1, "minute": 60, "hour": 3600}
_LEFT = re.compile(r"about (\d+) (second|minute|hour)s? left")
_FIRST = re.compile(r"^read |^audit: [1-9]")
PROMPT = "My sister Maria Keller will be operated on in Basel next Tuesday."


@dataclass(frozen=True)
class Ran:
    """A command's lines with their seconds, its exit code, and the processor's seconds."""

    lines: list[tuple[float, str]]
    code: int
    seconds: float
    cpu: float

    def first(self, pattern: re.Pattern[str] = _FIRST) -> float:
        return next((at for at, line in self.lines if pattern.search(line)), self.seconds)

    @property
    def factors(self) -> dict[int, float]:
        """Time left as it was said, over what it was, at about so many per cent of the way."""
        said = [
            (at, int(match[1]) * _UNITS[match[2]])
            for at, line in self.lines
            if (match := _LEFT.search(line)) is not None
        ]
        found: dict[int, float] = {}
        for share in (25, 50, 75):
            moment = self.seconds * share / 100
            before = [pair for pair in said if pair[0] <= moment]
            if before:
                at, left = before[-1]
                found[share] = max(1.0, left - (moment - at)) / (self.seconds - moment)
        return found


def keyhole(*words: object, cwd: Path, until: int | None = None) -> Ran:
    """Run it to its end, or kill it with its `until`-th line."""
    command = [sys.executable, "-m", "keyhole", *map(str, words)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    lines: list[tuple[float, str]] = []
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=cwd, text=True, **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.perf_counter() - started, line.rstrip()))
            if until is not None and len(lines) >= until:
                process.kill()
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(lines, process.returncode, seconds, cpu)


def run(
    quick: bool,
    parts: list[str] = PARTS,
    encoder: Path | None = None,
    model: Path | None = None,
    data: Path = subjects.DATA,
) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in ["errors", "folder"] if quick else parts:
            if part == "errors":
                yield from errors(folder)
            elif part == "folder":
                yield from one_folder(folder)
            elif part == "demo":
                yield from timed("the demo", keyhole("audit", "demo", cwd=folder), 20, None)
            elif part == "model":
                ran = keyhole("audit", subjects.minilm(encoder, "cpu").name, cwd=folder)
                yield from timed("a model, MiniLM", ran, 20, None)
            elif part == "store":
                yield from store(folder, encoder, data)
            else:
                yield from llama(folder, part, model or shipped())


def timed(
    what: str, ran: Ran, first: float, whole: float | None, details: str = ""
) -> Iterator[Row]:
    """Its first result, all of it, and whether the time left was true."""
    details = "; ".join(filter(None, (details, busy())))
    raw = {"what": what, **vars(ran), "load": os.getloadavg()[0]}
    yield show.ratio(
        f"{what}: first line of result", f"{ran.first():.0f} s", f"<= {first:.0f} s",
        ran.first() <= first, details,
    )  # fmt: skip
    yield Row(
        f"{what}: all of it", f"{ran.seconds:.0f} s, exit {ran.code}",
        "" if whole is None else f"<= {whole:.0f} s",
        None if whole is None else ran.seconds <= whole, f"{ran.cpu:.0f} s of processor",
        promise=False, run=raw,
    )  # fmt: skip
    factors = ran.factors
    yield show.ratio(
        f"{what}: time left at 25, 50, 75%",
        ", ".join(f"{share}%: {factor:.2f}" for share, factor in factors.items()) or "not said",
        "within a factor 1.5",
        bool(factors) and all(1 / 1.5 <= factor <= 1.5 for factor in factors.values()),
    )


def busy() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def errors(folder: Path) -> Iterator[Row]:
    """Five mistakes, each of which is one line."""
    (folder / "texts.txt").write_text("a text\n")
    (folder / "vectors.jsonl").write_text('{"embedding": [1.0], "text": "a"}\n')
    mistakes = (
        ("nowhere",), ("vectors.jsonl",), ("demo", "--only", "everything"),
        ("demo", "--known", "texts.txt"), ("demo", "--texts", "many"),
    )  # fmt: skip
    ran = [keyhole("audit", *words, cwd=folder) for words in mistakes]
    yield show.every("mistakes that end in one line", sum(_one_line(each) for each in ran), 5)
    worst = max(each.seconds for each in ran)
    cpu = max(each.cpu for each in ran)
    yield show.ratio(
        "mistakes: the slowest", f"{worst:.1f} s", "<= 3 s", worst <= 3,
        f"{cpu:.1f} s of processor; {busy()}",
    )  # fmt: skip


def _one_line(ran: Ran) -> bool:
    return ran.code == 2 and len(ran.lines) == 1


def one_folder(folder: Path) -> Iterator[Row]:
    """Three targets after one another, the first killed on its way, then begun again."""
    place = folder / "three"
    place.mkdir()
    names = [f"{name}.safetensors" for name in "abc"]
    for seed, name in enumerate(names):
        oracle.save(oracle.plant(dim=16, seed=seed), place / name)
    killed = keyhole("audit", names[0], cwd=place, until=3)
    ran = [keyhole("audit", name, cwd=place) for name in (names[1], names[2], names[0], names[0])]
    whole = sum(each.code == 1 for each in ran)
    yield show.every("audits in one folder after one that was killed", whole, 4)
    resumed = any("resuming" in line for _, line in ran[2].lines)
    yield show.exactly("the killed one goes on", (killed.code, resumed), (-9, True))
    audits = [json.loads((place / f"keyhole-{name}.json").read_text()) for name in names]
    yield show.every("findings kept", len({audit["identity"] for audit in audits}), 3)


def store(folder: Path, encoder: Path | None, data: Path) -> Iterator[Row]:
    loaded = subjects.minilm(encoder, "cpu")
    turns = (turn.split(":", 1)[-1].strip() for turn in subjects.turns(data, "dev"))
    texts = sorted({text for text in turns if 3 <= len(text.split()) <= 9})
    random.Random(7).shuffle(texts)
    way = Exposure("pooled", normalised=True)
    vectors = embeddings(loaded.model, loaded.tokenizer, texts[:60], way).float().tolist()
    rows = zip(texts, vectors, strict=False)
    lines = [json.dumps({"text": text, "embedding": vector}) for text, vector in rows]
    (folder / "store.jsonl").write_text("\n".join(lines) + "\n")
    ran = keyhole("audit", "store.jsonl", "--model", loaded.name, cwd=folder)
    said = [line for _, line in ran.lines if line.startswith("read ")]
    yield from timed("a store of 60 texts, 20 of them", ran, 60, 300, said[-1] if said else "")


def llama(folder: Path, part: str, model: Path) -> Iterator[Row]:
    slots = folder / part
    slots.mkdir()
    settings: Sequence[str] = {
        "embeddings": ["pooling=NONE"], "completions": [], "slot": [f"slots={slots}/"],
    }[part]  # fmt: skip
    with served(model, *settings) as url:
        target: str | Path = url
        if part == "slot":
            asked = {"prompt": PROMPT, "n_predict": 1, "id_slot": 0, "cache_prompt": True}
            httpx.post(f"{url}/completion", json=asked, timeout=120).raise_for_status()
            name = {"filename": "slot.bin"}
            saved = httpx.post(f"{url}/slots/0?action=save", json=name, timeout=120)
            saved.raise_for_status()
            target = slots / "slot.bin"
        ran = keyhole("audit", target, "--model", model, cwd=folder)
        (findings,) = folder.glob(f"keyhole-*{Path(str(target)).name.replace(':', '-')}*.json")
    what = {"slot": "a saved slot"}.get(part, f"llama.cpp, {part}")
    yield from timed(what, ran, 20, 120)
    yield show.exactly(f"{what}: called recovered without a comparison", unproved(findings), 0)


def unproved(findings: Path) -> int:
    """Findings called recovered though no text was verified, and nothing else compared."""

    def compared(finding: dict[str, Any]) -> bool:
        read = [each["verified"] for text in finding["texts"] for each in text["readings"]]
        return finding["error"] is not None or (bool(read) and all(read))

    made = json.loads(findings.read_text())["findings"]
    return sum(finding["status"] == "recovered" and not compared(finding) for finding in made)


if __name__ == "__main__":
    show.main(run)
