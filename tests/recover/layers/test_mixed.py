"""Caches mixed by KV-Cloak are recognised, read, and verified only if right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
import tiny_models as tiny
from keyhole.core import Status
from keyhole.models.capture import Exposure
from keyhole.recover import KeyValues, MixedCache, recover_text
from keyhole.recover.attack import Target
from keyhole.recover.layers.block_spans import Blocks, exchanged, fitted
from keyhole.recover.layers.mixed import judge_mixed, openings
from keyhole.recover.recovery import Mark
from keyhole.recover.simulate import leak_of

TEXT = [(37 * n + 11 * n * n) % 190 + 5 for n in range(34)]
KNOWN = TEXT[:10]
BLOCK = 8


@pytest.fixture(scope="module")
def llama():
    return tiny.model(
        "llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def words():
    made = tiny.tokenizer(causal=True)
    names = " ".join(made.convert_ids_to_tokens(KNOWN))
    made.chat_template = (
        "{% for m in messages %}" + names + " {{ m.content }} {% endfor %}"
    )
    return made


def cloaked(
    model, ids=TEXT, layer=1, size=BLOCK, dtype=torch.float32, seed=0, **options
):
    draw = np.random.default_rng(seed)
    plain = leak_of(model, None, ids, Exposure("kv", layer - 1))
    keys, values = (
        torch.stack(
            [
                torch.from_numpy(
                    reference.kv_cloak(head.double().numpy(), size, draw, **options)
                )
                for head in tensor
            ]
        ).to(dtype)
        for tensor in plain.tensors.values()
    )
    return MixedCache(keys, values, layer, size, KNOWN)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"scales": 2.0}),
        (torch.float32, {"added": False}),
        (torch.float32, {"size": 16}),
        (torch.float16, {}),
        (torch.bfloat16, {}),
    ],
)
def test_a_mixed_cache_is_read_whole_from_a_known_beginning(
    llama, words, dtype, options
):
    read = recover_text(llama, words, cloaked(llama, dtype=dtype, **options))
    assert read.ids == TEXT
    assert read.verified
    assert read.status is Status.RECOVERED
    assert set(read.marks) == {Mark.VERIFIED}


@pytest.mark.parametrize(("length", "seed"), [(32, 0), (25, 0), (32, 10)])
def test_the_length_is_found_out(llama, words, length, seed):
    leak = cloaked(llama, TEXT[:length], seed=seed)
    assert recover_text(llama, words, leak).ids == TEXT[:length]


def test_a_deeper_layer_is_read_left_to_right(llama, words):
    read = recover_text(llama, words, cloaked(llama, layer=2))
    assert read.ids == TEXT
    assert read.verified


def test_absolute_positions_are_read_left_to_right(words):
    gpt2 = tiny.model("gpt2", hidden_size=64, num_attention_heads=2)
    read = recover_text(gpt2, words, cloaked(gpt2))
    assert read.ids == TEXT
    assert read.verified


def test_it_is_recognised_without_being_told(llama, words):
    mixed = cloaked(llama)
    read = recover_text(llama, words, KeyValues(mixed.keys, mixed.values, 0))
    assert read.ids == TEXT
    assert read.verified
    assert read.method == "MixedKeys"
    plain = recover_text(llama, words, leak_of(llama, None, TEXT, "kv:0"))
    assert plain.ids == TEXT
    assert plain.method == "CachedKeys"


def test_a_template_opens_texts(llama, words):
    assert openings(Target.of(llama, words))[0] == KNOWN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_text_is_never_verified(llama, words, dtype):
    target = Target.of(llama, words)
    leak = cloaked(llama, dtype=dtype)
    assert judge_mixed(target, leak, TEXT).verified
    exchanged = [[*TEXT[:n], TEXT[n] + 1, *TEXT[n + 1 :]] for n in (0, 19, 33)]
    swapped = [*TEXT[:20], TEXT[21], TEXT[20], *TEXT[22:]]
    for other in (
        *exchanged,
        swapped,
        TEXT[:-1],
        [*TEXT, 5],
        [*TEXT, TEXT[-1]],
        TEXT[:16],
    ):
        assert not judge_mixed(target, leak, other).verified
    whole = TEXT[:32]  # fills its blocks
    assert judge_mixed(target, cloaked(llama, whole, dtype=dtype), whole).verified
    assert not judge_mixed(
        target, cloaked(llama, whole, dtype=dtype), whole[:-1]
    ).verified


def test_another_models_cache_is_not_verified(llama, words):
    other = tiny.model(
        "llama", 1, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    read = recover_text(llama, words, cloaked(other))
    assert not read.verified


def test_blocks_as_long_as_a_head_is_wide_hide_their_tokens(llama, words):
    leak = cloaked(llama, list(range(5, 69)), size=32)
    read = recover_text(llama, words, leak)
    assert read.status is Status.NOT_APPLICABLE
    assert "span all 32 dimensions" in read.reason


def test_right_tokens_lie_as_far_outside_as_rounding_puts_them(llama):
    leak = cloaked(llama, dtype=torch.bfloat16)
    plain = leak_of(llama, None, TEXT, "kv:0")
    blocks = Blocks.cut(leak, [BLOCK])[0]
    rows = [
        (plain.keys if side.keys else plain.values)[side.head] for side in blocks.sides
    ]
    solved = blocks.solved(rows, torch.arange(len(TEXT)))
    assert 0.7 < solved.level < 1.3  # a chi-square: q = 1
    others = [each.flip(0) for each in rows]
    assert blocks.solved(others, torch.arange(len(TEXT))).level > 3


@pytest.fixture(scope="module")
def biased():
    """A model with keys like Qwen2.5's: a bias far larger than what tokens add."""
    made = tiny.model(
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_bias=True,
    )
    bias = made.layers[0].self_attn.k_proj.bias
    bias.data = torch.randn(bias.shape, generator=torch.Generator().manual_seed(0))
    bias.data.view(2, 2, -1)[:, :, -4:] *= 200
    return made


def test_keys_whose_directions_rounding_hides_are_read_by_squares(biased, words):
    leak = cloaked(biased, dtype=torch.bfloat16)
    blocks = Blocks.cut(leak, [BLOCK])[0]
    assert (
        min(len(base) for side in blocks.sides if side.keys for base in side.bases)
        < BLOCK - 2
    )
    read = recover_text(biased, words, leak)
    assert read.ids == TEXT
    assert read.verified
    target = Target.of(biased, words)
    swapped = [*TEXT[:20], TEXT[21], TEXT[20], *TEXT[22:]]
    assert not judge_mixed(target, leak, swapped).verified


def test_squares_are_those_of_least_squares_number_by_number():
    stream = torch.Generator().manual_seed(0)
    block, rows, others = (
        torch.randn(shape, generator=stream, dtype=torch.float64)
        for shape in ((4, 12), (3, 12), (3, 2, 12))
    )
    spread = torch.rand(4, 12, generator=stream, dtype=torch.float64) + 0.5

    def witness(given):
        pairs = zip(block.numpy(), spread.numpy(), strict=True)
        return sum(np.linalg.lstsq((given / s).T, y / s)[1].item() for y, s in pairs)

    none = torch.zeros(0, 12, dtype=torch.float64)
    assert float(fitted(block, spread, rows[None], none)[0]) == pytest.approx(
        witness(rows.numpy())
    )
    found = exchanged(block, spread, rows, none, others)
    for place in range(3):
        for each in range(2):
            given = rows.numpy().copy()
            given[place] = others[place, each].numpy()
            assert float(found[place, each]) == pytest.approx(witness(given))
