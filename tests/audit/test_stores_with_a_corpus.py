"""A store read with a corpus: the reader is learnt once, kept while it is needed, and its own."""

from __future__ import annotations

import stat
from dataclasses import replace
from functools import partial

import pytest

import made_stores
import tiny_models as tiny
from command_line import inside
from keyhole.audit import Audit, audit, stores
from keyhole.audit.stores import StoreTarget
from keyhole.errors import InputError
from keyhole.models import Loaded, identity
from keyhole.models.capture import Exposure
from keyhole.progress import silent
from keyhole.recover.attacks.embedding_reader import EmbeddingReader
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Size
from keyhole.recover.embedding.search import Search
from keyhole.recover.pooling import embeddings
from keyhole.results import Status
from keyhole.stores import open_store

MODEL, WORDS = tiny.model("bert", num_hidden_layers=1), tiny.tokenizer()
LOADED = Loaded(MODEL, WORDS, identity(MODEL), "a tiny encoder")
TEXTS = [f"w{11 * number}" for number in range(1, 8)]
CORPUS = [f"w{number} w{(3 * number + 1) % 190}" for number in range(190)]
SMALL = {
    "longest": 1,
    "learning": Learning(steps=10, batch=32, rate=3e-3, size=Size(32, 1, 2), pool=32, every=50),
    "search": Search(
        rounds=8, trust=(0.0, 1e-4), kept=4, first=8, tokens=190, pieces=2
    ),  # one word is found,
}
LEARNING = "learning to read"


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Several checks without hundreds of vectors."""
    monkeypatch.setitem(stores._AT_ONCE_LEARNT, "cpu", 3)


@pytest.fixture
def store(tmp_path):
    vectors = embeddings(MODEL, WORDS, TEXTS, Exposure("pooled")).float().numpy()
    return made_stores.jsonl(tmp_path, vectors, TEXTS)


@pytest.fixture
def target(store, tmp_path):
    with open_store(store) as opened:
        sampled = StoreTarget.of(opened, LOADED, texts=len(TEXTS))
    method = EmbeddingReader(CORPUS, **SMALL)
    return replace(sampled, method=method, reader=tmp_path / "learnt.reader")


class Tracks(list):
    """The names of the parts that an audit went through; stops where it is told to."""

    stop: str = ""

    def __call__(self, name, total=None):
        if self.count(name) and name == self.stop:
            raise KeyboardInterrupt
        self.append(name)
        return silent


def test_one_reader_for_all_checks_reads_the_texts(target, tmp_path):
    tracks, journal = Tracks(), tmp_path / "journal"
    (finding,) = audit(target, track=tracks, journal=journal).findings
    assert tracks.count(LEARNING) == 1
    assert tracks.count("search for texts") == 3  # 7 texts, 3 at a time
    assert len(journal.read_text().splitlines()) == 1 + 3
    assert finding.attack == "EmbeddingReader"
    assert finding.status is Status.RECOVERED, finding.reason
    assert finding.estimate.exact == len(TEXTS)
    read = ["".join(piece.text for piece in r.pieces).strip() for r in finding.texts[0].readings]
    assert read == TEXTS


def test_a_stopped_audit_goes_on_with_what_it_learnt(target, tmp_path):
    journal, tracks = tmp_path / "journal", Tracks()
    tracks.stop = "search for texts"
    with pytest.raises(KeyboardInterrupt):
        audit(target, track=tracks, journal=journal)  # in its second check
    assert stat.S_IMODE(target.reader.stat().st_mode) == 0o600
    again = Tracks()
    (finding,) = audit(target, track=again, journal=journal).findings
    assert (again.count(LEARNING), again.count("search for texts")) == (0, 2)
    assert finding.status is Status.RECOVERED
    whole = audit(replace(target, reader=None))
    assert finding.texts == whole.findings[0].texts  # a file changes nothing


@pytest.mark.parametrize(
    "other",
    [
        {"corpus": CORPUS[1:]},
        {"learning": replace(SMALL["learning"], seed=1)},
        {"longest": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_reader_of_another_run_is_refused_or_replaced(other, target):
    first = replace(SMALL["learning"], steps=1)
    brief = replace(target, rows=target.rows[:1], vectors=target.vectors[:1], texts=(None,))
    brief = replace(brief, method=replace(target.method, learning=first))
    audit(brief)
    kept = target.reader.read_bytes()
    changed = {name: replace(value, steps=1) if name == "learning" else value
               for name, value in other.items()}  # fmt: skip
    changed = replace(brief, method=replace(brief.method, **changed))
    with pytest.raises(InputError, match=rf"{next(iter(other))}.*give --force to learn anew"):
        audit(changed)
    assert target.reader.read_bytes() == kept
    audit(changed, force=True)
    assert target.reader.read_bytes() != kept


def test_a_file_that_is_no_reader_stays_as_it_is(target):
    target.reader.write_text("precious")
    for force in (False, True):
        with pytest.raises(InputError, match="expected a learnt reader, got"):
            audit(target, force=force)
    assert target.reader.read_text() == "precious"


def test_the_command_keeps_the_reader_if_it_is_told_to(store, tmp_path, monkeypatch, capsys):
    MODEL.save_pretrained(tmp_path / "encoder")
    WORDS.save_pretrained(tmp_path / "encoder")
    (tmp_path / "texts.txt").write_text("\n".join(CORPUS))
    small = partial(EmbeddingReader, **SMALL)
    monkeypatch.setattr("keyhole.audit.targets.learns_from", lambda file, _: small(file))
    arguments = (
        "audit", store, "--model", "encoder", "--corpus", "texts.txt", "--force",
    )  # fmt: skip
    here = partial(inside, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    done = here(*arguments, "--texts", 1)
    assert done.returncode == 1, done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-report.json").findings
    assert finding.attack == "CountedReader"  # on a CPU, where no file for a reader is named
    assert not list(tmp_path.glob("*.reader"))
    assert not list(tmp_path.glob("*.journal"))
    done = here(*arguments, "--texts", 2, "--reader", "kept.reader")
    assert done.returncode == 1, done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-report.json").findings
    assert (finding.estimate.exact, finding.estimate.sample) == (2, 2)
    assert finding.attack == "EmbeddingReader"
    assert (tmp_path / "kept.reader").exists()
