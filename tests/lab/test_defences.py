"""The table of defences: its noise is as private as it says, and its rows are measured."""

from __future__ import annotations

import pytest
import torch

from command_line import inside
from keyhole.lab import defences
from keyhole.lab.defences import DefenceTable, Verdict
from keyhole.models.demo import TEXTS, load_demo
from keyhole.recover.defences import stated
from keyhole.recover.gradients.update import noise_for
from keyhole.recover.secrets import SECRETS, hidden_by, secrets_of, shown_again
from keyhole.recover.simulate import leak_of


@pytest.fixture(autouse=True)
def few_public_texts(monkeypatch):
    monkeypatch.setattr(defences, "PUBLIC", defences.PUBLIC[:2])


@pytest.fixture(scope="module")
def plans():
    made = defences.sections(load_demo("classification"), 0)
    return {
        f"{guards}: {name}": make
        for guards, rows in made.items()
        for name, make in rows
    }


def test_privacy_that_says_nothing_is_no_proof():
    assert "2.98e+03/N" in stated(noise_for(8), 1.0, 10, 4096)[1]
    assert stated(0.001, 1.0, 10, 4096)[1] == ""


@pytest.mark.parametrize("form", SECRETS)
def test_whoever_has_the_key_has_the_cache(form):
    loaded = defences.stand_in(load_demo())
    leak = leak_of(loaded.model, loaded.tokenizer, TEXTS[0] + " " + TEXTS[1], "kv:0")
    secrets = secrets_of(leak, form, 3, torch.Generator().manual_seed(0))
    hidden = hidden_by(secrets, leak)
    size = min(hidden.keys.shape[1], leak.keys.shape[1])
    assert not torch.allclose(hidden.keys[:, :size], leak.keys[:, :size], atol=0.1)
    back = shown_again(hidden, secrets, leak)
    for name in ("keys", "values"):
        assert torch.allclose(getattr(back, name), getattr(leak, name), atol=1e-5)


BROKEN = (
    "cache: secret rotation, 0",
    "cache: AES-GCM, one nonce",
    "cache: KV-Shield, 1",
    "gradient: none",
    "logits: two decimals",
    "weights: unusual inputs refused",
)


@pytest.mark.parametrize("name", BROKEN)
def test_what_an_attack_that_knows_it_breaks(plans, name):
    row = plans[name]()
    assert row.verdict is Verdict.BROKEN, row
    assert row.factor > 0
    assert not row.proof


@pytest.mark.parametrize(
    ("name", "proof"),
    [
        ("gradient: noise, ε = 8", "equally likely"),
        ("weights: a budget of half the unknowns", "36"),
    ],
)
def test_what_is_proved_says_why(plans, name, proof):
    row = plans[name]()
    assert row.verdict is Verdict.PROVED
    assert proof in row.proof


def test_the_table_counts_its_rows_and_comes_back_from_its_file(
    plans, tmp_path, monkeypatch
):
    few = [
        (name, make) for name, make in plans.items() if name.startswith("weights: r")
    ]
    monkeypatch.setattr(defences, "sections", lambda _loaded, _seed: {"weights": few})
    found = defences.table()
    assert [row.defence for row in found.rows] == [
        "rounding",
        "rounding, norms clipped",
    ]
    found.save(tmp_path / "table.json")
    assert DefenceTable.load(tmp_path / "table.json") == found
    assert "2 rows, 1 broken, 1 partly broken" in found.summary()


def test_the_command_prints_and_saves_the_table(plans, tmp_path, monkeypatch, capsys):
    few = [("budget", plans["weights: a budget of half the unknowns"])]
    monkeypatch.setattr(defences, "sections", lambda _loaded, _seed: {"weights": few})
    words = ("lab", "defences", "--out", "table.json")
    done = inside(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == 0, done.stderr
    assert "36 numbers do not settle 72 unknowns" in done.stdout
    assert "1 rows, 0 broken" in done.stdout
    (row,) = DefenceTable.load(tmp_path / "table.json").rows
    assert row.verdict is Verdict.PROVED
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
