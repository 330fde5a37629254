"""Which of several encoders made the vectors: by known texts it is certain, else a guess."""

from __future__ import annotations

import pytest

import made_stores
import tiny_models as tiny
from keyhole.audit import audit, open_target
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.recover.embeddings.pooling import embeddings

TEXTS = [f"w{number} w{number + 40}" for number in range(12)]
SEEDS = {"first": 0, "second": 1, "third": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    for name, seed in SEEDS.items():
        tiny.model("bert", seed, num_hidden_layers=1).save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    tiny.model("bert", num_hidden_layers=1, hidden_size=48).save_pretrained(folder / "wider")
    tiny.tokenizer().save_pretrained(folder / "wider")
    return folder


def vectors(name):
    model = tiny.model("bert", SEEDS[name], num_hidden_layers=1)
    return embeddings(model, tiny.tokenizer(), TEXTS, Exposure("pooled")).float().numpy()


def opened(store, folders, *names):
    encoders = [str(folders / name) for name in names]
    (target,) = open_target(store, model=encoders, texts=4).stores.values()
    return target


@pytest.mark.parametrize(
    ("name", "maker"), [("first", made_stores.jsonl), ("second", made_stores.npy)],
    ids=["texts", "none"],
)  # fmt: skip
def test_the_right_one_is_found_and_how_sure_is_said(name, maker, folders, tmp_path):
    target = opened(maker(tmp_path, vectors(name), TEXTS), folders, "first", "wider", "second")
    assert target.loaded.name == target.encoder == str(folders / name)
    reason = target.pooling.reason
    if maker is made_stores.jsonl:
        assert target.pooling.sure
        assert f"of 2 encoders {folders / name} made them: " in reason  # the wider cannot have
    else:
        assert f"of 2 encoders {folders / name} is likeliest, which is a guess" in reason
        assert "--known makes sure" in reason


def test_none_of_them_could_not_be_checked(folders, tmp_path):
    store = made_stores.jsonl(tmp_path, vectors("third"), TEXTS)
    audited = audit(opened(store, folders, "first", "second"))
    assert (audited.findings[0].status, audited.exit_code) == (Status.MISMATCH, 3)
    assert "none of 2 encoders made them" in audited.findings[0].reason


def test_one_alone_is_refused_as_before(folders, tmp_path):
    store = made_stores.npy(tmp_path, vectors("first"), TEXTS)
    with pytest.raises(InputError, match="makes vectors of 48 numbers"):
        opened(store, folders, "wider")
    assert "encoders" not in opened(store, folders, "first").pooling.reason
