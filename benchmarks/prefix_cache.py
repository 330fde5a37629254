"""Whether one client can tell that another's prompt is cached, on llama.cpp's own server.

xllamacpp serves `--model FILE.gguf` on this machine with its defaults, which keep the
prompts of all clients. In each of `--prompts` trials another client sends either the
turn of DREAM that the attacker guesses or another of the same length, by the toss of a
coin, and then a third one. The attacker requests one token for the guess: was it
cached? They judge by time alone, against a threshold from their own prompts sent twice,
or by the field that the answer has (`timings.cache_n`, or
`usage.prompt_tokens_details.cached_tokens`).

In a second attack a known prompt ends with four unknown digits. The field tells how
many tokens were cached, so that the digits are guessed one by one. A wrong guess
replaces the cached prompt, which the other client therefore sends again each time.
Without a model nothing is started.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import show
import subjects
from servers import served
from show import Row

OWN = 5  # prompts of the attacker, for the threshold
KNOWN = "Your account is confirmed. Never share this code with anyone. Your code is "


def run(
    quick: bool,
    data: Path = subjects.DATA,
    model: Path | None = None,
    prompts: int = 40,
    tokens: int = 48,
    secrets: int = 10,
) -> Iterator[Row]:
    if quick or model is None:
        yield Row(
            "a server's prefix cache",
            "nothing was started: --model FILE.gguf was not given",
        )
        return
    with served(model) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield from guesses(client, subjects.turns(data, "dev"), prompts, tokens)
        yield from digits(client, secrets)


def ask(client: httpx.Client, ids: list[int]) -> tuple[int, float]:
    """Return how many tokens of a prompt the answer calls cached, and the seconds it took."""
    request = {"prompt": ids, "n_predict": 1, "temperature": 0}
    answer, seconds = show.timed(
        lambda: client.post("/completion", json=request).json()
    )
    return answer["timings"]["cache_n"], seconds


def tokenized(client: httpx.Client, text: str) -> list[int]:
    return client.post("/tokenize", json={"content": text}).json()["tokens"]


def guesses(
    client: httpx.Client, lines: list[str], prompts: int, tokens: int
) -> Iterator[Row]:
    words: list[int] = []
    wanted = (3 * prompts + OWN) * tokens
    for line in lines:
        words += tokenized(client, line)
        if len(words) >= wanted:
            break
    texts = [words[start : start + tokens] for start in range(0, wanted, tokens)]
    own = texts[:OWN]
    rest = texts[OWN:]
    fresh = list[float]()
    again = list[float]()
    for text in own:
        fresh.append(ask(client, text)[1])
        again.append(ask(client, text)[1])
    threshold = (statistics.median(fresh) * statistics.median(again)) ** 0.5
    coin = random.Random(0)
    items = list[dict[str, Any]]()
    for number in range(prompts):
        guess, other, third = rest[3 * number : 3 * number + 3]
        sent = coin.random() < 0.5
        ask(client, guess if sent else other)
        ask(client, third)
        cached, seconds = ask(client, guess)
        items.append({"sent": sent, "cached": cached, "seconds": round(seconds, 4)})
    for how, says in (
        ("time alone", lambda item: item["seconds"] < threshold),
        ("the field", lambda item: item["cached"] >= tokens // 2),
    ):
        right = sum(says(item) == item["sent"] for item in items)
        yield Row(
            f"was a prompt of {tokens} tokens sent? by {how}",
            f"{right} of {prompts} right",
            details=f"{sum(item['sent'] for item in items)} were; cached "
            f"{statistics.median(again):.3f} s, not {statistics.median(fresh):.3f} s",
            items=items,
        )


def digits(client: httpx.Client, secrets: int) -> Iterator[Row]:
    known = tokenized(client, KNOWN.strip())
    draw = random.Random(1)
    space = tokenized(client, "Your code is 1")[
        len(tokenized(client, "Your code is")) : -1
    ]
    digit = [tokenized(client, str(number))[-1] for number in range(10)]
    items: list[dict[str, Any]] = []
    for _ in range(secrets):
        secret = [draw.randrange(10) for _ in range(4)]
        prompt = [*known, *space, *(digit[number] for number in secret)]
        found = list[int]()
        questions = 0
        for _ in secret:
            for number in range(10):
                ask(
                    client, [*prompt, digit[0]]
                )  # the other client, whose text continues
                guess = [*known, *space, *(digit[each] for each in [*found, number])]
                questions += 1
                if ask(client, [*guess, 0])[0] >= len(guess):
                    found.append(number)
                    break
        items.append({"right": found == secret, "questions": questions})
    right = sum(item["right"] for item in items)
    yield Row(
        "four digits after a known prompt, token by token, by the field",
        f"{right} of {secrets} right",
        details=f"{statistics.mean(item['questions'] for item in items):.1f} questions each, "
        "of 10,000 possible codes",
        items=items,
    )


if __name__ == "__main__":
    show.main(run)
