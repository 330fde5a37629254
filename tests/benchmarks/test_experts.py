"""Text from the experts that a router chose, against every text there is."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from experts import choices_of, read_choices, router_logits

pytestmark = pytest.mark.release  # what belongs to benchmarks
WORDS = 24
EXPERTS = 8
CHOSEN = 2


def mixture(layers, words=WORDS, kind="Mixtral"):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": words,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": CHOSEN,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "pad_token_id": None,
        "eos_token_id": None,
    }
    name = "num_local_experts" if kind == "Mixtral" else "num_experts"
    config = getattr(transformers, f"{kind}Config")(**sizes, **{name: EXPERTS})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # some begin at 0
                weight.normal_()
    return model


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe"])
def test_choices_of_enough_layers_give_the_text(kind):
    model = mixture(4, kind=kind)
    ids = torch.randint(WORDS, (1, 8), generator=torch.Generator().manual_seed(1))
    logits = router_logits(model, ids)
    read = read_choices(model, choices_of(logits, CHOSEN)[0])
    assert (read.ids, read.verified, read.certain) == (ids[0].tolist(), True, 8)
    shares = logits[0].softmax(-1)
    assert read_choices(
        model, choices_of(logits, CHOSEN)[0], probabilities=shares
    ).verified


@pytest.mark.parametrize("seed", range(4))
def test_verified_means_that_no_other_text_has_the_choices(seed):
    model = mixture(1, words=6)
    every = torch.tensor(list(itertools.product(range(6), repeat=3)))
    chosen = choices_of(router_logits(model, every), CHOSEN).sort(-1).values.flatten(1)
    number = int(
        torch.randint(len(every), (), generator=torch.Generator().manual_seed(seed))
    )
    same = every[(chosen == chosen[number]).all(1)]
    read = read_choices(model, chosen[number].view(3, 1, CHOSEN), most=300)
    assert read.left == len(same)
    assert read.verified == (len(same) == 1)
    assert read.ids in same.tolist()
    agree = [len(set(column)) == 1 for column in same.T.tolist()]
    assert read.certain == [*agree, False].index(False)


def test_what_was_dropped_is_not_verified():
    model = mixture(1)
    ids = torch.randint(WORDS, (1, 6), generator=torch.Generator().manual_seed(1))
    read = read_choices(model, choices_of(router_logits(model, ids), CHOSEN)[0], most=1)
    assert not read.verified


def test_choices_of_no_text_are_not_read():
    model = mixture(4)
    drawn = torch.Generator().manual_seed(2)
    choices = torch.stack(
        [
            torch.stack(
                [torch.randperm(EXPERTS, generator=drawn)[:CHOSEN] for _ in range(4)]
            )
            for _ in range(5)
        ]
    )
    read = read_choices(model, choices)
    assert (read.verified, read.left) == (False, 0)
