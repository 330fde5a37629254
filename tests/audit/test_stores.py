"""Stores in the audit: a sample is read back with the encoder's weights, and nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.normalizers import BertNormalizer

import made_stores
import tiny_models as tiny
from exposures import written
from keyhole import report
from keyhole.assess import assess
from keyhole.audit import Audit, audit, open_target
from keyhole.audit.stores import EXPOSURE, StoreTarget, sample
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.models.demo import EXAMPLES, load_demo
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.stores import open_store

TEXTS = [f"w{number}" for number in (1, 20, 3, 44, 150, 6)]
MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()
LOADED = tiny.loaded(MODEL, name="a tiny encoder")
FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
LINES = [f"w{number}" for number in range(1, 40)]
SHORT = CountedReader(LINES, max_length=1, search=SumSearch(passes=400))


def vectors_of(texts=TEXTS, way=Exposure("pooled")):  # noqa: B008 - it is frozen
    return embeddings(MODEL, WORDS, texts, way).float().numpy()


def sampled(target, **options):
    with open_store(str(target)) as store:
        return replace(
            StoreTarget.of(store, LOADED, **{"texts": 2, **options}), method=SHORT
        )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    MODEL.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("maker", made_stores.MAKERS, ids=lambda maker: maker.__name__)
def test_an_audit_reads_every_kind_and_changes_nothing(maker, tmp_path, encoder):
    folder = tmp_path / "store"
    folder.mkdir()
    name = maker(folder, vectors_of(), TEXTS)
    known = tmp_path / "known.txt"
    known.write_text(f"{TEXTS[4]}\n{TEXTS[1]}\n")
    before = made_stores.fingerprint(folder)
    opened = open_target(name, model=encoder, texts=1, known=known)
    (store,) = (replace(part, method=SHORT) for part in opened.parts)
    (finding,) = audit(replace(opened, parts=(store,))).findings
    assert made_stores.fingerprint(folder) == before
    assert finding.exposure == replace(EXPOSURE, part=finding.part)
    assert finding.status is Status.RECOVERED, finding.reason
    estimate = finding.estimate
    assert (estimate.exact, estimate.sample, estimate.population) == (1, 1, 6)
    with_texts = maker in made_stores.WITH_TEXTS
    for row, reading in zip(store.rows, finding.texts[0].readings, strict=True):
        assert reading.original == (TEXTS[row] if with_texts else "")
        assert written(reading) == TEXTS[row]
        assert [piece.right for piece in reading.pieces] == [with_texts or None]


def test_the_sample_follows_from_the_seed():
    first, again, other = (sample(500, 20, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert first == sorted(set(first))
    assert sample(500, 900, 0) == list(range(500))
    drawn = [row for seed in range(100) for row in sample(500, 20, seed)]
    counts = np.histogram(drawn, bins=10, range=(0, 500))[0]
    # 2,000 draws in ten parts: four standard deviations
    assert abs(counts - 200).max() < 60


def test_what_is_wrong_with_a_text_is_shown(tmp_path):
    """The search is told a length that one of two texts does not have."""
    texts = ["w1", "w9 w8 w7"]
    target = sampled(made_stores.jsonl(tmp_path, vectors_of(texts), texts))
    (finding,) = audit(target).findings
    whole, part = finding.texts[0].readings
    assert whole.exact
    assert not part.exact
    assert len(part.pieces) == 3  # the tokens that are missing count as well
    assert part.known < 0.5
    assert finding.status is Status.INEXACT
    assert finding.reason.startswith("of 2 texts, 1 can be read exactly: all tried")
    own = "mean pooling, normalised: gives the vectors of the store's own texts"
    assert own in finding.reason
    assert (whole.tokens, whole.overlap, part.tokens) == (1, 1.0, 3)
    assert whole.similarity == pytest.approx(1, abs=1e-6)
    guess = "".join(piece.text for piece in part.pieces if piece.text != " ?").strip()
    # a word of one, three of two
    assert part.overlap == 2 * (guess in texts[1].split()) / (1 + 3)
    near, far = vectors_of([guess, texts[1]])
    assert part.similarity == pytest.approx(float(near @ far), abs=1e-6)


@pytest.mark.parametrize(
    "maker", [made_stores.jsonl, made_stores.npy], ids=["texts", "none"]
)
def test_a_search_that_does_not_arrive_is_no_clean_store(maker, tmp_path):
    """It looks for texts of another length than any of these has."""
    texts = ["w1 w2 w3 w4", "w9 w8 w7 w6 w5"]
    audited = audit(sampled(maker(tmp_path, vectors_of(texts), texts), known=texts))
    (finding,) = audited.findings
    assert (finding.status, audited.exit_code) == (Status.BUDGET, 3)
    assert finding.estimate is None  # nothing is said of the other texts
    assert finding.reason.startswith(
        "none of the 2 texts tried was read: the search ended before"
    )
    assert "--corpus" in finding.reason
    assert assess(audited).verdict.startswith("Could not check")
    assert "could not check" in report.render(audited)


def test_the_pooling_of_known_texts_is_used(tmp_path):
    way = Exposure("pooled", 0, "max", False)
    name = made_stores.npy(tmp_path, vectors_of(way=way), TEXTS)
    target = sampled(name, known=TEXTS[:1])
    exposure = target.pooling.exposure
    assert (exposure.pooling, exposure.normalised) == ("max", False)
    assert audit(target).findings[0].status is Status.RECOVERED


def test_a_text_without_a_token_does_not_hide_the_others(tmp_path):
    """BERT's tokenizer removes characters that are not visible."""
    words = tiny.tokenizer()
    words.backend_tokenizer.normalizer = BertNormalizer()
    name = made_stores.jsonl(tmp_path, vectors_of(), ["\u200b", *TEXTS[1:]])
    with open_store(name) as store:
        target = StoreTarget.of(store, replace(LOADED, tokenizer=words), texts=6)
    assert target.pooling.sure
    (finding,) = audit(replace(target, method=SHORT)).findings
    assert finding.estimate.exact == 5


def test_one_vector_has_no_others_that_retrieval_is_measured_on(tmp_path):
    target = sampled(made_stores.jsonl(tmp_path, vectors_of(TEXTS[:1]), TEXTS[:1]))
    found = audit(target, against_defences=True).findings
    behind = [each for each in found if each.exposure.variant == "defended"]
    assert len(behind) == 4
    assert all("nan" not in each.reason for each in behind)


def test_another_encoder_could_not_be_checked(tmp_path):
    noise = np.random.default_rng(0).normal(size=(6, 32))
    audited = audit(sampled(made_stores.jsonl(tmp_path, noise, TEXTS)))
    assert audited.findings[0].status is Status.MISMATCH
    assert "was it another encoder?" in audited.findings[0].reason
    assert audited.exit_code == 3


def test_another_width_is_refused(tmp_path):
    name = made_stores.npy(tmp_path, np.ones((3, 40)), TEXTS)
    with pytest.raises(InputError, match="a tiny encoder makes vectors of 32 numbers"):
        sampled(name)
    # fewer, and not its first
    name = made_stores.jsonl(tmp_path, np.ones((3, 8)), TEXTS[:3])
    with pytest.raises(InputError, match=r"have 8, which are not its first ones: give"):
        sampled(name)


@pytest.mark.parametrize("unit", [True, False])
def test_truncated_vectors_are_read_and_judged_as_such(unit, tmp_path):
    """The first 24 of 32 numbers, normalised again or not."""
    way = Exposure("pooled", 0, "mean", True, 24, unit)
    target = sampled(made_stores.jsonl(tmp_path, vectors_of(way=way), TEXTS), texts=3)
    assert (target.pooling.exposure, target.pooling.sure) == (way, True)
    (finding,) = audit(target).findings
    assert finding.status is Status.RECOVERED, finding.reason
    assert "truncated to the first 24 numbers" in finding.reason
    for reading in finding.texts[0].readings:
        assert reading.verified
        assert reading.similarity == pytest.approx(1, abs=1e-6)


def test_truncated_vectors_are_recognised_without_a_text(tmp_path):
    """By how their numbers vary together; in another order they are another encoder's."""
    shipped = load_demo()
    way = Exposure("pooled", 0, "mean", True, 32, unit=True)
    texts = [example.text for example in EXAMPLES]
    vectors = embeddings(shipped.model, shipped.tokenizer, texts, way).float().numpy()
    with open_store(made_stores.npy(tmp_path, vectors, texts)) as store:
        target = StoreTarget.of(store, shipped, texts=2)
    pooling = target.pooling
    assert (pooling.exposure.width, pooling.exposure.unit) == (32, True)
    assert not pooling.sure
    assert "they vary together as the encoder's first numbers do" in pooling.reason
    other = np.roll(vectors, 5, axis=1)
    message = r"do not look like its first ones: .* --known"
    with (
        open_store(made_stores.npy(tmp_path, other, texts)) as store,
        pytest.raises(InputError, match=message),
    ):
        StoreTarget.of(store, shipped, texts=2)


def test_json_and_page_hold_what_was_read(tmp_path):
    name = made_stores.npy(tmp_path, vectors_of(), TEXTS)
    audited = audit(sampled(name, known=TEXTS))
    assert Audit.from_dict(json.loads(json.dumps(audited.to_dict()))) == audited
    page = report.render(audited)
    estimate = audited.findings[0].estimate
    assert f"texts ({estimate.share}" in page
    assert str(estimate) in page
    assert "the store has no text of it" in page
    assert " verified" in page
    assert ' wrong"' not in page  # nobody knows the original


def test_a_journal_keeps_the_finding_of_this_store_alone(tmp_path):
    journal = tmp_path / "journal"
    texts = [f"w{number}" for number in range(4)]
    target = sampled(made_stores.jsonl(tmp_path, vectors_of(texts), texts), texts=4)
    first = audit(target, journal=journal)
    assert first.findings[0].status is Status.RECOVERED
    readings = first.findings[0].texts[0].readings
    assert [reading.original for reading in readings] == texts
    kept = journal.read_text().splitlines()
    assert len(kept) == 5  # what determines the run, and a check of each vector
    again = audit(target, journal=journal)
    assert again.findings == first.findings  # its seconds too: nothing was read twice
    journal.write_text("\n".join(kept[:2]) + "\n")  # stopped after the first
    resumed = audit(target, journal=journal).findings[0]
    assert resumed.texts == first.findings[0].texts
    assert resumed.estimate == first.findings[0].estimate
    changed = replace(target, vectors=target.vectors + 1e-3 * torch.ones(32))
    with pytest.raises(InputError, match="journal"):
        audit(changed, journal=journal)


@pytest.mark.parametrize("right", [False, pytest.param(True, marks=FULL)])
def test_the_command(right, tmp_path, encoder, keyhole):
    """With vectors of the encoder, which takes a whole search, and with others."""
    text = "w7 w9 w8"
    vectors = vectors_of([text]) if right else np.ones((1, 32))
    made_stores.jsonl(tmp_path, vectors, [text])
    done = keyhole("audit vectors.jsonl --texts 1 --model", encoder)
    audited = Audit.load(tmp_path / "keyhole-vectors.jsonl.json")
    assert done.returncode == audited.exit_code, done.stderr
    assert report.words.exposure(EXPOSURE) in done.stdout
    (finding,) = audited.findings
    page = (tmp_path / "keyhole-vectors.jsonl.html").read_text("utf-8")
    if right:
        assert f"texts ({finding.estimate.share}" in done.stdout
        assert text in page
    else:
        assert finding.status is Status.MISMATCH
        assert done.returncode == 3
        advice = "was it another encoder? Name it with --model"
        assert advice in " ".join(done.stdout.split())
        assert "no pooling of this encoder" in page


OF_DEMO = "vectors.npy --model demo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("vectors.npy", "the vector store vectors.npy needs --model"),
        (f"{OF_DEMO} --data x", "--data does not apply to the vector store"),
        ("demo --model demo", "--model does not apply to demo"),
        ("demo --corpus x", "cannot read x as a corpus: there is no such file"),
        ("x.safetensors --corpus x", "there is no x.safetensors"),
        (f"{OF_DEMO} --corpus none", "cannot read none as a corpus"),
        (f"{OF_DEMO} --ledger l", "--ledger keeps the answers of an endpoint"),
        ("none.npy --model demo", "cannot read none.npy as an array of vectors"),
        (OF_DEMO, "makes vectors of"),
        (f"{OF_DEMO} --known none", "none"),
        ("http://127.0.0.1:9/v1/embeddings --model demo", "give --known with texts"),
    ],
)
def test_wrong_wishes_are_one_line(arguments, message, tmp_path, keyhole):
    made_stores.npy(tmp_path, np.ones((3, 200)), TEXTS)
    done = keyhole("audit", arguments)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())


def test_what_an_encoder_cuts_off_did_not_come_back(tmp_path, encoder):
    """The folder says after how many tokens; the store's texts may be longer."""
    folder = shutil.copytree(encoder, tmp_path / "encoder")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 3}')
    name = made_stores.jsonl(tmp_path, vectors_of(["w5"]), ["w5 w6 w7"])
    store = open_target(name, model=str(folder), texts=1).store
    assert (store.max_length, store.pooling.sure) == (3, True)
    (finding,) = audit(replace(store, method=SHORT)).findings
    (reading,) = finding.texts[0].readings
    assert reading.verified
    assert not reading.exact
    assert reading.note == "cut off after 3 of 5 tokens"


WIDE = tiny.model("bert", num_hidden_layers=1, hidden_size=256, num_attention_heads=2)


def bits(v):
    return np.packbits(v > 0, axis=1)


IN_BYTES = {  # in 8 bits, and in one as sentence-transformers has it
    "int8": lambda v: np.round(127 * v / np.abs(v).max(1, keepdims=True)).astype(
        np.int8
    ),
    "ubinary": bits,
    "binary": lambda v: (bits(v).astype(np.int16) - 128).astype(np.int8),
    "raw bytes": lambda v: np.array([row.tobytes() for row in bits(v)]),
}


@pytest.mark.parametrize(
    ("kept", "known"),
    [("int8", True), ("ubinary", False), ("binary", True), ("raw bytes", True)],
)
def test_columns_of_bytes_are_read(kept, known, tmp_path):
    """The texts come back from 8 bits, or from the sign alone, of each number."""
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    given = embeddings(WIDE, WORDS, TEXTS, Exposure("pooled")).float().numpy()
    columns = {"id": list(range(len(TEXTS))), "vector": list(IN_BYTES[kept](given))}
    columns |= {"text": TEXTS} if known else {}
    writer.write_table(arrow.table(columns), tmp_path / "v.parquet")
    loaded = tiny.loaded(WIDE, name="a wide encoder")
    with open_store(str(tmp_path / "v.parquet")) as store:
        target = StoreTarget.of(store, loaded, texts=2)
    assert target.vectors.shape == (2, 256)
    assert target.pooling.sure is known
    assert ("one bit" in target.source.note) is (kept != "int8")
    (finding,) = audit(replace(target, method=SHORT)).findings
    readings = finding.texts[0].readings
    verified = [reading.verified for reading in readings]
    assert any(verified), finding.reason
    for row, reading in zip(target.rows, readings, strict=True):
        assert not reading.verified or written(reading) == TEXTS[row]
