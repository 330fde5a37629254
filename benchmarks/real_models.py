"""Real checkpoints: are their hidden states and caches read, how fast, and with how much memory?

`--models` are folders and .gguf files. `--texts` turns of DREAM's dialogues of 8 to 40
tokens are read in the model's own precision (or `--dtype bfloat16`) from hidden states
at a quarter, half and all of its layers, and from caches if it is causal. Verified must
mean right. Of an encoder-decoder both parts are read: the decoder's text is the model's
own output for the turn.

`--sizes 0.1,1.5,7` measures the cost of size on a GPU: Llamas with about so many
billion random parameters of scale 0.02, in bfloat16. A random text of `--length` tokens
is read from half of the layers, from the last, and from the cache at half. Reported are
tokens per second and the peak memory relative to the weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import show
import subjects
from keyhole.models import Exposure, Loaded, anatomy, identity, load_model
from keyhole.models.loading import task_of
from keyhole.models.pairs import decoder_of, encoder_of, is_pair
from show import Row

# Layers, width, width of the feed-forward layer, heads: SmolLM2, Qwen2.5-1.5B and Llama
# 2 7B.
SHAPES = {
    0.1: (30, 576, 1536, 9),
    1.5: (28, 1536, 8960, 12),
    7.0: (32, 4096, 11008, 32),
}
VOCABULARY = 32_000


def run(
    quick: bool,
    data: Path = subjects.DATA,
    device: str = subjects.DEVICE,
    models: list[Path] = [],  # noqa: B006 - read, never changed
    dtype: str | None = None,
    texts: int = 50,
    sizes: list[float] = [],  # noqa: B006
    length: int = 100,
) -> Iterator[Row]:
    if quick:
        ids = subjects.tiny_texts(2, 6, framed=False)
        yield from of_model("random llama", subjects.tiny("llama"), ids)
        return
    for name in models:
        loaded = opened(Path(name), device)
        if dtype:
            loaded = replace(loaded, model=loaded.model.to(getattr(torch, dtype)))
        ids = subjects.short_turns(data, loaded, texts)
        if is_pair(loaded.model):
            yield from of_pair(Path(name).name, loaded, ids)
        else:
            yield from of_model(Path(name).name, loaded, ids)
    for size in sizes:
        yield from of_size(size, device, length)


def opened(name: Path, device: str) -> Loaded:
    if task_of(name) in ("classification", "choice", "causal"):
        task = "base"
    else:
        task = task_of(name)
    return load_model(name, device=device, task=task)


def of_pair(name: str, loaded: Loaded, ids: list[torch.Tensor]) -> Iterator[Row]:
    """Read the encoder, then the decoder that attends to its states."""
    model = loaded.model
    decoder = replace(loaded, model=decoder_of(loaded.model))
    yield from of_model(f"{name}, its encoder", loaded, ids)
    with torch.no_grad():
        states = [
            encoder_of(model)(input_ids=each[None]).last_hidden_state[0] for each in ids
        ]
        ids = [
            model.generate(each[None], num_beams=1, max_new_tokens=60)[0]
            for each in ids
        ]
    yield from of_model(f"{name}, its decoder", decoder, ids, states)


def of_model(
    name: str,
    loaded: Loaded,
    ids: list[torch.Tensor],
    states: list[torch.Tensor] | None = None,
) -> Iterator[Row]:
    parts = anatomy(loaded.model)
    weights = next(loaded.model.parameters()).dtype
    half = parts.layers // 2
    wanted = [
        Exposure("hidden", layer)
        for layer in sorted({max(1, half // 2), half, parts.layers})
    ]
    if parts.causal:
        wanted += [Exposure("kv", layer) for layer in sorted({half, parts.layers - 1})]
    for exposure in wanted:
        items, seconds = subjects.read_back(loaded, ids, exposure, encoder=states)
        tokens = sum(item["tokens"] for item in items)
        yield subjects.verified(
            f"{name}, {str(weights).removeprefix('torch.')}, {exposure} of {parts.layers}",
            items,
            f"{tokens / seconds:,.0f} tokens per second, {seconds:.1f} s; "
            f"{statistics.mean(len(each) for each in ids):.0f} tokens per text",
            0.98,
            False,
        )


def of_size(size: float, device: str, length: int) -> Iterator[Row]:
    loaded = random_llama(size, device)
    weights = sum(each.numel() * each.itemsize for each in loaded.model.parameters())
    stream = torch.Generator().manual_seed(0)
    low = len(subjects.SPECIAL)
    ids = list(torch.randint(low, VOCABULARY, (1, length), generator=stream))
    layers = anatomy(loaded.model).layers
    for exposure in (
        Exposure("hidden", layers // 2),
        Exposure("hidden", layers),
        Exposure("kv", layers // 2),
    ):
        torch.cuda.reset_peak_memory_stats()
        items, seconds = subjects.read_back(loaded, ids, exposure)
        exact, _ = subjects.claims(items)
        ratio = torch.cuda.max_memory_allocated() / weights
        yield Row(
            f"{size:g}B random, bfloat16, {exposure} of {layers}, 1 of {length} tokens",
            f"{exact} of 1 exact and verified, {ratio:.2f} × the weights' memory",
            "all, <= 1.3 ×",
            exact == 1 and ratio <= 1.3,
            f"{length / seconds:,.1f} tokens per second, {seconds:.1f} s; weights "
            f"{weights / 1e9:.2f} GB",
            promise=False,
            items=items,
        )


def random_llama(size: float, device: str) -> Loaded:
    import transformers

    layers, width, inner, heads = SHAPES[size]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.02,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaModel._from_config(config, dtype=torch.bfloat16)
    names = [
        *subjects.SPECIAL,
        *(f"w{n}" for n in range(VOCABULARY - len(subjects.SPECIAL))),
    ]
    model = model.eval().requires_grad_(False)
    words = subjects.word_tokenizer(names, framed=False)
    return Loaded(model, words, identity(model), f"{size:g}B")


if __name__ == "__main__":
    show.main(run)
