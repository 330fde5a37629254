"""Leaks with a secret, and known texts that give it away."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.recover import recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.leaks import HiddenStates, KeyValues
from keyhole.recover.own_texts import hidden, own_texts, secret, undone
from keyhole.recover.secrets import (
    BLOCK,
    SECRETS,
    by_lengths,
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
    return tiny.loaded(model, name="bert")


@pytest.fixture(scope="module")
def llama():
    model = tiny.model("llama")
    return tiny.loaded(model, True, "llama")


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
    known = own_texts(target, Exposure.parse(exposure), secret("rotated"), seed=0)
    plain = leak(bert, exposure)
    (undone,) = unrotated(known, [degrade(plain, forms=["rotated:7"])])
    for before, after in zip(matrices_of(plain), matrices_of(undone), strict=True):
        assert torch.allclose(before, after, atol=1e-4)
    few = [(leak_of(bert.model, bert.tokenizer, "w1 w2", exposure),) * 2]
    with pytest.raises(Unsuccessful, match="rows of known texts span 4 of"):
        unrotated(few, [plain])


def read_behind(loaded, texts, exposure, form, by_own_texts=True):
    """Return how many texts are read behind a secret, and how many own texts that took."""
    target = Target.of(loaded.model, loaded.tokenizer)
    defence = secret(form)
    leaks = [hidden(leak(loaded, exposure, text), defence, 0) for text in texts]
    if by_own_texts:
        known = own_texts(target, Exposure.parse(exposure), defence, 0)
        leaks = undone(known, leaks, defence)
    else:
        known = []
        leaks = unrotated(by_lengths(target, leaks), leaks)
    read = recover_texts(loaded.model, loaded.tokenizer, leaks)
    pairs = zip(read, texts, strict=True)
    exact = [each.verified and each.text == text for each, text in pairs]
    return sum(exact), len(known)


@pytest.mark.parametrize("form", SECRETS)
def test_whoever_has_the_key_has_the_cache(llama, form):
    plain = leak(llama, "kv:0")
    secrets = secrets_of(plain, form, 3, torch.Generator().manual_seed(0))
    stored = matrices_of(hidden_by(secrets, plain))
    for given, rows, before in zip(secrets, stored, matrices_of(plain), strict=True):
        rows = rows.double()
        assert not torch.allclose(rows[: len(before)].float(), before, atol=0.1)
        if given.mixes is not None:
            blocks = zip(given.mixes, rows.split(BLOCK), strict=True)
            rows = torch.cat(
                [torch.linalg.solve(*pair) - given.added for pair in blocks]
            )
        back = rows @ torch.linalg.inv(given.map)
        assert torch.allclose(back[: len(before)].float(), before, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "exposure"), [("bert", "hidden:1"), ("bert", "kv:1"), ("llama", "kv:0")]
)
def test_texts_come_back_from_behind_a_rotation(family, exposure, request):
    loaded = request.getfixturevalue(family)
    exact, own = read_behind(loaded, TEXTS[:1], exposure, "rotated")
    assert exact == 1
    assert own > 1


@pytest.mark.parametrize("form", ["rotated", "shielded"])
def test_without_the_key_it_is_another_models(llama, form):
    hidden = degrade(leak(llama, "kv:0"), forms=[f"{form}:7"])
    (recovery,) = recover_texts(llama.model, llama.tokenizer, [hidden])
    assert not recovery.verified


def test_a_permutation_of_numbers_is_undone_from_one_text(llama):
    assert read_behind(llama, TEXTS[:2], "kv:1", "shielded") == (2, 1)


@pytest.mark.parametrize("form", ["rotated", "shielded"])
@pytest.mark.parametrize(("family", "exposure"), [("bert", "kv:1"), ("llama", "kv:0")])
def test_lengths_tell_the_tokens_where_no_text_is_known(
    family, exposure, form, request
):
    loaded = request.getfixturevalue(family)
    assert read_behind(loaded, TEXTS[:2], exposure, form, False) == (2, 0)


@pytest.mark.parametrize("change", [{"forms": ["permuted"]}, {"precision": "int4"}])
def test_other_defences(bert, change):
    leaks = [degrade(leak(bert, "hidden:1"), **change)]
    (recovery,) = recover_texts(bert.model, bert.tokenizer, leaks)
    assert recovery.verified
    assert recovery.text == TEXTS[0]


def test_what_cannot_be_done(bert):
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
