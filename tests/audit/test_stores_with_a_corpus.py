"""A store read with a corpus: it is counted once, and a stopped audit goes on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import made_stores
import tiny_models as tiny
from exposures import written
from keyhole.audit import Audit, audit, stores
from keyhole.audit.stores import StoreTarget
from keyhole.core import Status
from keyhole.core.progress import silent
from keyhole.models.capture import Exposure
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.stores import open_store

MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()
LOADED = tiny.loaded(MODEL)
TEXTS = [f"w{11 * number}" for number in range(1, 8)]
CORPUS = [f"w{number} w{(3 * number + 1) % 190}" for number in range(190)]
COUNTING = "counting the corpus"


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Several checks without hundreds of vectors."""
    monkeypatch.setitem(stores.AT_ONCE, "cpu", 3)


@pytest.fixture
def store(tmp_path):
    vectors = embeddings(MODEL, WORDS, TEXTS, Exposure("pooled")).float().numpy()
    return made_stores.jsonl(tmp_path, vectors, TEXTS)


@pytest.fixture
def target(store):
    with open_store(store) as opened:
        sampled = StoreTarget.of(opened, LOADED, texts=len(TEXTS))
    method = CountedReader(CORPUS, max_length=1, search=SumSearch(passes=1_000))
    return replace(sampled, method=method)


class Tracks(list):
    """The names of the parts that an audit went through."""

    def __call__(self, name, total=None):
        self.append(name)
        return silent


def test_a_corpus_is_counted_once_for_all_checks(target, tmp_path):
    tracks = Tracks()
    journal = tmp_path / "journal"
    (finding,) = audit(target, track=tracks, journal=journal).findings
    assert tracks.count(COUNTING) == 1
    assert len(journal.read_text().splitlines()) == 1 + 3  # 7 texts, 3 at a time
    assert finding.attack == "CountedReader"
    assert finding.status is Status.RECOVERED, finding.reason
    assert finding.estimate.exact == len(TEXTS)
    assert [written(reading) for reading in finding.texts[0].readings] == TEXTS


def test_what_noise_would_change_is_measured_on_the_store_itself(target):
    method = replace(target.method, search=SumSearch(passes=200))
    target = replace(target, method=method)
    notices = []
    found = audit(target, against_defences=True, notice=notices.append).findings
    assert [line for line in notices if "tried" in line][-1].count("(7 tried)") == 1
    behind = [each for each in found if each.exposure.variant == "defended"]
    assert len(found) == 1 + len(behind)
    assert len(behind) == 4
    read = {each.exposure.name.split(",")[0]: each for each in behind}
    assert set(read) == {"Gaussian noise", "rounding"}
    for each in behind:
        count, lost = re.match(
            r"(\d) of 4 texts, the shortest of the 7 tried, were read exactly, and recall@10 falls "
            r"by ([\d.]+)%",
            each.reason,
        ).groups()
        (cell,) = each.texts
        assert [reading.original for reading in cell.readings] == list(target.texts[:4])
        assert cell.exact == int(count)
        assert each.known == cell.known
        assert 0 <= float(lost) <= 100
    strongest = read["Gaussian noise"]  # the last of them
    assert strongest.status is Status.NOT_IDENTIFIABLE


def test_a_text_that_is_not_read_behind_a_defence_is_kept(target):
    """The attack ran to its end: a defence that held is no check without a result."""
    others = replace(target.method, corpus=["w7 w8", "w9"], search=SumSearch(passes=5))
    found = audit(replace(target, method=others), against_defences=True).findings
    statuses = {each.status for each in found if each.exposure.variant == "defended"}
    assert Status.UNSOLVED in statuses
    assert Status.BUDGET not in statuses


def test_a_stopped_audit_goes_on_with_the_checks_that_are_left(
    target, tmp_path, monkeypatch
):
    journal = tmp_path / "journal"
    read = stores.read
    parts = []

    def stopped_in_the_second(part, track):
        parts.append(part.rows)
        if len(parts) == 2:
            raise KeyboardInterrupt
        return read(part, track)

    monkeypatch.setattr(stores, "read", stopped_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        audit(target, journal=journal)
    (finding,) = audit(target, journal=journal).findings
    assert parts == [(0, 1, 2), (3, 4, 5), (3, 4, 5), (6,)]
    assert finding.texts == audit(target).findings[0].texts


def test_the_command_reads_with_a_corpus(store, tmp_path, keyhole):
    MODEL.save_pretrained(tmp_path / "encoder")
    WORDS.save_pretrained(tmp_path / "encoder")
    (tmp_path / "texts.txt").write_text("\n".join(CORPUS))
    done = keyhole("audit", store, "--model encoder --corpus texts.txt --texts 2")
    assert done.returncode == 1, done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-vectors.jsonl.json").findings
    assert (finding.estimate.exact, finding.estimate.sample) == (2, 2)
    assert finding.attack == "CountedReader"
    assert "counts of the corpus, nothing learnt" in finding.reason
    assert not list(tmp_path.glob("*.journal"))
