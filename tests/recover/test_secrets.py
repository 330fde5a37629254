"""Leaks with a secret, and known texts that give it away."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models import Loaded, identity
from keyhole.models.capture import Exposure
from keyhole.recover import recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.defences import DEFENCES, own_texts, read_behind
from keyhole.recover.leaks import HiddenStates, KeyValues
from keyhole.recover.secrets import (
    SECRETS,
    hidden_by,
    matrices_of,
    secrets_of,
    unrotated,
)
from keyhole.recover.simulate import degrade, leak_of

TEXTS = [
    " ".join(f"w{(7 * n + 3 * k * k) % 190}" for n in range(20)) for k in range(1, 4)
]


@pytest.fixture(scope="module")
def bert():
    model = tiny.model("bert")
    return Loaded(model, tiny.tokenizer(), identity(model), "bert")


@pytest.fixture(scope="module")
def llama():
    model = tiny.model("llama")
    return Loaded(model, tiny.tokenizer(causal=True), identity(model), "llama")


def leak(loaded, exposure, text=TEXTS[0]):
    return leak_of(loaded.model, loaded.tokenizer, text, exposure)


def behind(plain, form, key=3, seed=0):
    return hidden_by(
        secrets_of(plain, form, key, torch.Generator().manual_seed(seed)), plain
    )


@pytest.mark.parametrize("exposure", ["hidden:1", "kv:1"])
def test_a_secret_is_the_same_for_all_texts_of_a_key(bert, exposure):
    plain = leak(bert, exposure)
    for before, after, other in zip(
        matrices_of(plain),
        matrices_of(behind(plain, "rotated")),
        matrices_of(behind(plain, "rotated", key=4)),
        strict=True,
    ):
        assert torch.allclose(
            before @ before.T, after @ after.T, atol=1e-4
        )  # lengths and angles
        assert not torch.allclose(before, after, atol=1e-2)
        assert not torch.allclose(after, other, atol=1e-2)


@pytest.mark.parametrize("exposure", ["hidden:1", "kv:1", "kv:2"])
def test_a_rotation_is_undone(bert, exposure):
    target = Target.of(bert.model, bert.tokenizer)
    known = own_texts(target, Exposure.parse(exposure), "rotated", seed=0)
    plain = leak(bert, exposure)
    (undone,) = unrotated(known, [degrade(plain, forms=["rotated:7"])])
    for before, after in zip(matrices_of(plain), matrices_of(undone), strict=True):
        assert torch.allclose(before, after, atol=1e-4)
    few = [(leak_of(bert.model, bert.tokenizer, "w1 w2", exposure),) * 2]
    with pytest.raises(Unsuccessful, match="rows of known texts span 4 of"):
        unrotated(few, [plain])


@pytest.mark.parametrize(
    ("family", "exposure"), [("bert", "hidden:1"), ("bert", "kv:1"), ("llama", "kv:0")]
)
def test_texts_come_back_from_behind_a_rotation(family, exposure, request):
    tried = read_behind(request.getfixturevalue(family), TEXTS[:1], exposure, "rotated")
    assert (tried.status, tried.exact) == (Status.RECOVERED, 1), tried.reason
    assert tried.own > 1


@pytest.mark.parametrize("form", ["rotated", "shielded"])
def test_without_the_key_it_is_another_models(llama, form):
    hidden = degrade(leak(llama, "kv:0"), forms=[f"{form}:7"])
    (recovery,) = recover_texts(llama.model, llama.tokenizer, [hidden])
    assert not recovery.verified


def test_a_permutation_of_numbers_is_undone_from_one_text(llama):
    tried = read_behind(llama, TEXTS[:2], "kv:1", "shielded")
    assert (tried.exact, tried.own) == (2, 1), tried.reason


@pytest.mark.parametrize("form", ["rotated", "shielded"])
@pytest.mark.parametrize(("family", "exposure"), [("bert", "kv:1"), ("llama", "kv:0")])
def test_lengths_tell_the_tokens_where_no_text_is_known(
    family, exposure, form, request
):
    tried = read_behind(
        request.getfixturevalue(family), TEXTS[:2], exposure, form, own=0
    )
    assert (tried.exact, tried.own) == (2, 0), tried.reason


@pytest.mark.parametrize("defence", sorted({*DEFENCES} - {*SECRETS}))
def test_other_defences(bert, defence):
    tried = read_behind(bert, TEXTS[:1], "hidden:1", defence)
    assert tried.status is Status.RECOVERED, tried.reason
    assert tried.own == 0


def test_what_cannot_be_done(bert):
    with pytest.raises(InputError, match="choose one of none, permuted"):
        read_behind(bert, TEXTS[:1], "hidden:1", "hope")
    with pytest.raises(InputError, match="give one secret, not rotated and shielded"):
        degrade(leak(bert, "kv:1"), forms=["shielded:1", "rotated:1"])
    with pytest.raises(InputError, match="rotated:KEY"):
        degrade(leak(bert, "hidden:1"), forms=["rotated"])
    with pytest.raises(InputError, match="no secret is applied to"):
        degrade(leak(bert, "maps:1"), forms=["rotated:1"])
    with pytest.raises(InputError, match="only keys and values can be cloaked"):
        degrade(leak(bert, "pooled"), forms=["cloaked:1"])
    assert isinstance(degrade(leak(bert, "kv:1"), forms=["shielded:1"]), KeyValues)
    permuted = degrade(leak(bert, "hidden:1"), forms=["permuted", "rotated:1"])
    assert isinstance(permuted, HiddenStates)
    assert permuted.permuted
