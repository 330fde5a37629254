"""Texts from embeddings of an encoder that the attacker can only query: exact reads, queries.

An embeddings server (`POST /v1/embeddings`, as OpenAI's) runs on this machine. The
attacker has its address, the stored vectors, the tokenizer and a corpus, but not the
weights. Every text sent counts as one query, including those that count the corpus and
single words; a repeated text costs nothing. The search
(recover/embeddings/sum_search.py) stops after `--passes` per text. Nothing is verified,
because the judge needs gradients. A different text with the same vector (within 1e-6)
is wrong.

The server is MiniLM (or another `--encoder`) behind http.server. Zero2Text (Kim et al.,
2026) reports 2,180 queries per text. `--quick` takes a model with random weights.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import torch
from torch import Tensor

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED, Counted
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.sum_search import SumSearch
from show import Row

AT_ONCE = 256  # texts in one request


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 20,
    passes: int = 3_000,
    tokens: str = "4-9",
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", words=96)
        lines = subjects.random_lines(loaded, 90, 1, 2)
        with answering(loaded) as url:
            yield measured(
                "random bert", url, loaded.tokenizer, lines[4:], lines[:3], 300, 2
            )
        return
    loaded = subjects.minilm(encoder, device)
    name = Path(loaded.name).parent.name if encoder is None else encoder.stem
    ((least, most),) = subjects.lengths(tokens)
    words = loaded.tokenizer
    secrets = subjects.sentences(data, words, least, most)
    corpora = {
        "the corpus that ships": read_texts(SHIPPED),
        "5,000 lines of the same domain": read_texts(data / "sst2" / "train.tsv")[
            :5_000
        ],
    }
    with answering(loaded) as url:
        for corpus, lines in corpora.items():
            some = [line for line in secrets if line not in set(lines)][:texts]
            yield measured(
                f"{name}, {corpus}", url, words, lines, some, passes, most + 3
            )


def measured(
    name: str,
    url: str,
    tokenizer: Any,
    corpus: Sequence[str],
    secrets: Sequence[str],
    passes: int,
    max_length: int,
) -> Row:
    encoder = Queried(url, tokenizer)
    lines = [
        ids
        for ids in tokenizer(list(corpus), add_special_tokens=False)["input_ids"]
        if ids
    ]
    truths = tokenizer(list(secrets), add_special_tokens=False)["input_ids"]
    goals = encoder.ask(secrets)  # the stored vectors: not queries of the attacker
    encoder.known.clear()
    counted = Counted.of(encoder, lines, max_length)
    counting = len(encoder.known)
    search = SumSearch(passes=passes)
    items: list[dict[str, Any]] = []
    for goal, truth in zip(encoder.directions(goals), truths, strict=True):
        before = len(encoder.known)
        (reading,) = search(encoder, goal[None], counted, max_length)
        items.append(
            {
                "tokens": len(truth),
                "exact": reading.tokens == truth,
                "cosine": reading.cosine,
                "f1": subjects.f1(reading.tokens, truth),
                "queries": len(encoder.known) - before,
            }
        )
    exact = sum(item["exact"] for item in items)
    wrong = sum(
        item["cosine"] > 1 - search.arrived and not item["exact"] for item in items
    )
    each = statistics.mean(item["queries"] for item in items)
    f1 = statistics.mean(item["f1"] for item in items)
    return Row(
        name,
        f"{exact} of {len(items)} exact, {each + counting / len(items):,.0f} queries a text",
        "0 wrong",
        wrong == 0,
        f"{each:,.0f} of them for the text itself, and {counting:,} once for all {len(items)}, to "
        f"count the corpus; token F1 {f1:.3f}; {wrong} other texts with the same vector",
        items=items,
    )


class Queried(Encoder):
    """An encoder whose vectors come from a server; its own weights are random and unused.

    `known` holds the answers so far, one for each query.
    """

    def __init__(self, url: str, tokenizer: Any) -> None:
        import transformers

        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
        )
        super().__init__(Target.of(transformers.BertModel(config).eval(), tokenizer))
        self.client = httpx.Client(timeout=300)
        self.url = f"{url}/v1/embeddings"
        self.known: dict[str, Tensor] = {}

    def values(self, texts: Texts, fast: bool = False) -> Tensor:  # noqa: ARG002
        self.passes += len(texts)
        rows = [texts.tokens(row) for row in range(len(texts))]
        return self.ask(self.target.tokenizer.batch_decode(rows))

    def ask(self, texts: Sequence[str]) -> Tensor:
        fresh = list(dict.fromkeys(text for text in texts if text not in self.known))
        for start in range(0, len(fresh), AT_ONCE):
            some = fresh[start : start + AT_ONCE]
            answer = self.client.post(
                self.url, json={"model": "default", "input": some}
            )
            for entry in answer.raise_for_status().json()["data"]:
                self.known[some[entry["index"]]] = torch.tensor(entry["embedding"])
        return torch.stack([self.known[text] for text in texts])


@contextmanager
def answering(loaded: Loaded) -> Generator[str]:
    """Serve an encoder as OpenAI's embeddings on a port of this machine, and yield its URL."""
    encoder = Encoder(Target.of(loaded.model, loaded.tokenizer), Exposure("pooled"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
                "input"
            ]
            ids = loaded.tokenizer(asked, add_special_tokens=False)["input_ids"]
            texts = Texts.of(ids, max(1, *map(len, ids)), encoder.device)
            rows = encoder.vectors(texts).tolist()
            data = [
                {"index": number, "embedding": row} for number, row in enumerate(rows)
            ]
            body = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    show.main(run)
