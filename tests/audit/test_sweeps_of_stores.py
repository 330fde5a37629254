"""Many vectors of a store: checks side by side, a journal that goes on, a page that stays small."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest

import made_stores
import tiny_models as tiny
from exposures import written
from keyhole import report
from keyhole.audit import Audit, audit, open_target, stores
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch

FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()
BRIEF = CountedReader(["w1 w2"], max_length=1, search=SumSearch(passes=100))


def texts(count):
    """One word each, so that a tiny search arrives."""
    return [f"w{(7 * number) % 190}" for number in range(count)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    MODEL.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def opened(tmp_path, encoder):
    """A store that was opened by name, read with a corpus."""

    def target(count, method=None, **options):
        vectors = embeddings(MODEL, WORDS, texts(190), Exposure("pooled"))
        kept = texts(count)
        rows = [kept.index(text) for text in kept]
        name = made_stores.jsonl(tmp_path, vectors.float().numpy()[rows], kept)
        made = open_target(name, model=encoder, texts=count, **options)
        parts = tuple(replace(part, method=method) for part in made.parts)
        return replace(made, parts=parts)

    return target


def counting(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(texts(190)))
    return CountedReader(corpus, max_length=1, search=SumSearch(passes=1_000))


def read(audited):
    return [written(reading) for reading in audited.findings[0].texts[0].readings]


@pytest.mark.parametrize(
    "count",
    [18, pytest.param(110, marks=pytest.mark.release), pytest.param(4000, marks=FULL)],
)
def test_hundreds_of_vectors_are_read_and_all_are_counted(count, opened, tmp_path):
    """More of them than one check, or one page, takes."""
    journal = tmp_path / "journal"
    audited = audit(opened(count, counting(tmp_path)), journal=journal)
    (finding,) = audited.findings
    # Short texts come first: they take less time.
    assert sorted(read(audited)) == sorted(texts(count))
    assert read(audited) == [reading.original for reading in finding.texts[0].readings]
    assert (finding.estimate.exact, finding.estimate.population) == (count, count)
    # each as soon as it is read
    assert len(journal.read_text().splitlines()) == 1 + count
    page = report.render(audited)
    assert (f"The first 100 of {count:,} texts" in page) == (count > 100)
    assert len(page) < 200_000


@pytest.mark.release
def test_processes_give_what_this_one_gives(opened, encoder, tmp_path):
    """They open store and encoder by their names, and count the corpus themselves."""
    opened(9)
    options = {"model": encoder, "corpus": str(counting(tmp_path).corpus)}
    here, there = (
        audit(str(tmp_path / "vectors.jsonl"), **options, processes=count)
        for count in (0, 2)
    )
    assert read(there) == read(here)
    assert sorted(read(here)) == sorted(texts(9))
    assert there.findings[0].status == here.findings[0].status
    assert there.findings[0].estimate == here.findings[0].estimate


def test_workers_need_a_target_by_its_name(opened):
    message = "--processes and --dask need a target by its name"
    with pytest.raises(InputError, match=message):
        audit(opened(2, BRIEF), processes=1)


def test_all_of_a_store_by_the_command(opened, encoder, tmp_path, monkeypatch, keyhole):
    opened(4)
    monkeypatch.setitem(stores.AT_ONCE, "cpu", 2)
    monkeypatch.setattr("keyhole.audit.stores.read", partial(briefly, stores.read))
    view = f"audit vectors.jsonl --model {encoder} --texts"
    done = keyhole(view, "all")
    assert done.returncode in (1, 3), done.stderr
    assert "audit: 1 of 2 checks" in done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-vectors.jsonl.json").findings
    assert len(finding.texts[0].readings) == 4
    done = keyhole(view, "some")
    assert done.returncode == 2
    assert "--texts" in done.stderr


def briefly(read, part, track):
    return read(replace(part, method=BRIEF), track)
