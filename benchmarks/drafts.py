"""What the accepted drafts of speculative decoding give away, on llama.cpp's own server.

xllamacpp serves `--model FILE.gguf` on this machine, with drafts of up to `--most`
tokens that it looks up in the prompt (`ngram-simple`). The tokens of one step are sent
together, so that anybody who sees the times of a streamed answer's chunks, encrypted or
not, can count the accepted drafts. The model is told to repeat each of `--prompts`
turns of DREAM: once for its owner, and once for an observer who has the same weights
and all candidates. The observer picks the candidate whose steps are nearest by edit
distance, without the text or the sizes of chunks. The bits reported are what the steps
tell about which candidate it was. Without a model nothing is started.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

import show
import subjects
from servers import served
from show import Row

TOGETHER = (
    0.02  # most seconds between chunks of one step; a step of the model takes longer
)


def run(
    quick: bool,
    data: Path = subjects.DATA,
    model: Path | None = None,
    prompts: int = 20,
    tokens: int = 48,
    most: int = 8,
) -> Iterator[Row]:
    if quick or model is None:
        yield Row(
            "a server's drafts", "nothing was started: --model FILE.gguf was not given"
        )
        return
    lines = [
        text for text in subjects.turns(data, "dev") if 30 <= len(text.split()) <= 45
    ]
    texts = [asked_for(text) for text in lines[:prompts]]
    with (
        served(model, f"draft={most}") as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        seen = [steps(client, text, tokens) for text in texts]
        own = [steps(client, text, tokens) for text in texts]
    yield from rows(
        [each[0] for each in seen], [each[0] for each in own], "the times of chunks"
    )
    fields = [[[each[1]] for each in side] for side in (seen, own)]
    yield from rows(fields[0], fields[1], "draft_n_accepted alone")


def asked_for(text: str) -> str:
    start = " ".join(text.split()[:2])
    return (
        "<|im_start|>user\nRepeat word by word: "
        f"{text}<|im_end|>\n<|im_start|>assistant\n{start}"
    )


def steps(client: httpx.Client, prompt: str, tokens: int) -> tuple[list[int], int]:
    """Return the number of tokens of each step, and the accepted drafts of the last chunk."""
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "stream": True}
    counts = list[int]()
    before = 0.0
    last = dict[str, Any]()
    with client.stream("POST", "/completion", json=request) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            last = json.loads(line.removeprefix("data: "))
            if last.get("stop"):
                break
            if counts and now - before < TOGETHER:
                counts[-1] += 1
            else:
                counts.append(1)
            before = now
    return counts, last.get("timings", {}).get("draft_n_accepted", 0)


def rows(seen: list[list[int]], own: list[list[int]], how: str) -> Iterator[Row]:
    items: list[dict[str, Any]] = []
    for number, counts in enumerate(seen):
        apart = [edits(counts, other) for other in own]
        nearest = [place for place, each in enumerate(apart) if each == min(apart)]
        items.append(
            {
                "steps": counts,
                "nearest": nearest,
                "right": nearest == [number],
                "apart": apart[number],
            }
        )
    sizes = Counter(map(tuple, own)).values()
    bits = math.log2(len(own)) - sum(size * math.log2(size) for size in sizes) / len(
        own
    )
    right = sum(item["right"] for item in items)
    yield Row(
        f"which of {len(own)} prompts it was, by {how}",
        f"{right} of {len(seen)} right",
        details=f"{bits:.2f} of {math.log2(len(own)):.2f} bits; "
        f"{sum(item['apart'] == 0 for item in items)} the same both times",
        items=items,
    )


def edits(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the edit distance: insertions, deletions and replacements."""
    line = list(range(len(second) + 1))
    for row, left in enumerate(first, 1):
        above = line
        line = [row]
        for column, right in enumerate(second, 1):
            swap = above[column - 1] + (left != right)
            line.append(min(swap, above[column] + 1, line[-1] + 1))
    return line[-1]


if __name__ == "__main__":
    show.main(run)
