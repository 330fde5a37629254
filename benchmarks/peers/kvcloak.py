"""Prompts read from a model's first cached layer, protected by KV-Cloak's own code.

KV-Cloak (*Shadow in the Cache*, NDSS 2026, arXiv 2508.09442) runs from its authors'
repository (https://github.com/SiO-2/kvcloak, commit 6b40f36), with its secrets, its
`KVCloak.obfuscate` and its defaults (blocks of 16, A added, θ twice the largest
number).

    python benchmarks/peers/kvcloak.py --checkout kvcloak --model SMOLLM2.gguf --data
    DATA

Prompts are sentences of SST-2 with more than 12 words, either in the model's chat
template, which is public, or alone, so that the attacker knows nothing of them. Secrets
are drawn anew for every prompt. A prompt that is verified and wrong counts as false.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole import recover
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded
from show import Row

PEER = "https://github.com/SiO-2/kvcloak, commit 6b40f36"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def run(
    quick: bool,
    checkout: Path | None = None,
    data: Path = subjects.DATA,
    model: Path | None = None,
    known: list[str] = ["template", "nothing"],  # noqa: B006 - read, never changed
    precisions: list[str] = ["float32", "bfloat16"],  # noqa: B006
    block: int = 16,
    ratio: float = 1.0,
    prompts: int = 20,
) -> Iterator[Row]:
    if checkout is None:
        raise SystemExit(f"clone {PEER}, and give its folder as --checkout")
    cloak = peer(checkout)
    loaded = subjects.smollm2(model, "cpu")
    lines = read_texts(data / "sst2" / "dev.tsv", limit=400)
    long = [text for text in lines if len(text.split()) > 12]
    count = 2 if quick else prompts
    least = {"template": 0.99, "nothing": 0.0}
    for what in known:
        texts = [encoded(loaded, text, what == "template") for text in long[:count]]
        for precision in precisions:
            first = None if what == "template" else list[int]()
            items = [
                read_prompt(loaded, cloak, text, precision, block, ratio, first, n)
                for n, text in enumerate(texts)
            ]
            tokens = sum(item["tokens"] for item in items)
            right = sum(item["right"] for item in items)
            true, false = subjects.claims(items)
            verified = true + false
            seconds = [item["seconds"] for item in items]
            wanted = 0.9 if what == "template" else 0.5
            yield Row(
                f"{precision}, blocks of {block}, {what} known, {len(items)} prompts",
                f"{right / tokens:.1%} of {tokens} tokens in place, {verified} prompts verified, "
                f"{false} false; {statistics.median(seconds):.1f} s per prompt",
                f"{least[what]:.0%} in place, {wanted:.0%} verified, 0 false",
                right / tokens >= least[what]
                and verified >= wanted * len(items)
                and not false,
                f"longest {max(seconds):.1f} s; CPU time "
                f"{statistics.median(item['cpu'] for item in items):.1f} s per prompt",
                run={
                    "peer": PEER,
                    "known": what,
                    "precision": precision,
                    "block": block,
                    "ratio": ratio,
                    "items": items,
                },
            )


def peer(checkout: Path) -> Any:
    """Return the authors' function that protects one layer (1, heads, n, d) with new secrets."""
    sys.path.insert(0, str(checkout))
    from transformers.cache_utils import DynamicCache

    if not hasattr(DynamicCache, "from_legacy_cache"):  # they use transformers 4
        DynamicCache.from_legacy_cache = lambda past_key_values: past_key_values
    config = importlib.import_module("defense.config.get_kvcloak_config")
    theta = importlib.import_module("defense.config.get_theta_config")
    core = importlib.import_module("defense.core.kvcloak")

    def cloak(layer: Any, block: int, ratio: float, seed: int) -> Any:
        torch.manual_seed(seed)
        heads = layer[0].shape[1]
        size = layer[0].shape[-1]
        known = theta.analyze_kv_cache([layer])
        given = config.get_kvcloak_config(
            1, heads, size, block, known, ratio, ratio, 2.0
        )
        made = core.KVCloak(
            given, layer[0].dtype, fused=False, need_ratio=ratio != 1, add_a=True
        )
        return made.obfuscate([layer])[0]  # it may overwrite its input

    return cloak


def encoded(loaded: Loaded, text: str, template: bool) -> list[int]:
    if not template:
        return loaded.tokenizer(text)["input_ids"]
    talk = [{"role": "user", "content": text}]
    given = loaded.tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=True
    )
    return given["input_ids"]


def read_prompt(
    loaded: Loaded,
    cloak: Any,
    ids: list[int],
    precision: str,
    block: int,
    ratio: float,
    known: list[int] | None,
    seed: int,
) -> dict[str, Any]:
    """Read one prompt; with `known` None, the attack has to notice that the cache is mixed."""
    plain = subjects.leak_of(loaded, ids, Exposure("kv", 0))
    layer = [tensor[None].to(DTYPES[precision]) for tensor in plain.tensors.values()]
    keys, values = cloak(layer, block, ratio, seed)
    leak: Any = recover.KeyValues(keys, values, 0)
    if known is not None:
        leak = recover.MixedCache(keys, values, known=known)
    before = time.process_time()
    read, seconds = show.timed(
        lambda: recover.recover_text(loaded.model, loaded.tokenizer, leak)
    )
    cpu = time.process_time() - before
    return {
        "text": loaded.tokenizer.decode(ids),
        "tokens": len(ids),
        "exact": list(read.ids) == ids,
        "right": sum(a == b for a, b in zip(read.ids, ids, strict=False)),
        "verified": read.verified,
        "reason": read.reason,
        "seconds": round(seconds, 3),
        "cpu": round(cpu, 3),
    }


if __name__ == "__main__":
    show.main(run)
