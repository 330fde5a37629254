"""Text in the audit: every exposure of a model, judged by who knows the text."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

import tiny_models as tiny
from exposures import by_name, names, written
from keyhole import report
from keyhole.audit import Audit, audit, texts
from keyhole.audit.texts import PERMUTED, PRECISIONS, TextTarget, left_out
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure as Shown
from keyhole.core.progress import untracked
from keyhole.core.registry import Entry
from keyhole.invert import recover_texts
from keyhole.models.capture import Exposure
from keyhole.models.demo import TEXTS, load_demo
from keyhole.recover.attack import Proposal
from keyhole.recover.registry import ATTACKS, Row, readers
from keyhole.recover.simulate import degrade, leak_of
from keyhole.report import words

WORDS = ("w1 w20 w3 w4 w100 w7 w55", "w9 w8 w77 w66 w3 w3 w12 w14")


def target(family, depth=2, **options):
    model = tiny.model(family, num_hidden_layers=depth)
    loaded = tiny.loaded(model, family in tiny.DECODERS, family)
    return TextTarget(loaded, WORDS, **options)


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(target("bert"))


def test_hidden_states_keys_and_maps_give_the_text_away(audited):
    by_exposure = by_name(audited.findings)
    for name in (
        "hidden states of layer 1",
        "hidden states of layer 2",
        "keys and values of layer 1",
        "attention maps of layer 1",
    ):
        finding = by_exposure[name]
        assert finding.status is Status.RECOVERED, finding.reason
        assert finding.sought == "text"
        assert finding.known == 1.0
    seen = {cell.precision for cell in by_exposure["hidden states of layer 1"].texts}
    assert seen == set(PRECISIONS) - {PERMUTED}
    (unordered,) = by_exposure["hidden states in no order of layer 1"].texts
    assert unordered.precision == PERMUTED
    assert "pooled embedding" in by_exposure


@pytest.mark.parametrize("exposure", ["hidden:1", "kv:1", "maps:1"])
def test_tokens_that_are_all_alike_are_not_identifiable(exposure):
    blank = target("bert")
    with torch.no_grad():
        table = blank.loaded.model.get_input_embeddings().weight
        table.copy_(table[7].clone().expand_as(table))
    (check,) = texts.checks_of("it", blank, Exposure.parse(exposure), "float32", 0)
    (finding,) = check.run(untracked).findings
    assert finding.status is Status.NOT_IDENTIFIABLE
    assert "tokens could be others" in finding.reason


def test_a_model_that_computes_no_numbers_is_refused():
    broken = target("bert")
    value = broken.loaded.model.encoder.layer[0].attention.self.value
    with torch.no_grad():
        value.weight[0, 0] = torch.nan
    checks = texts.checks_of("it", broken, Exposure("hidden", 2), "float32", 0)
    place = r"hold some, in encoder\.layer\.0\.attention\.self\.value"
    with pytest.raises(InputError, match=place):
        checks[0].run(untracked)


def test_a_reading_says_which_tokens_are_right(audited):
    for finding in audited.findings:
        for cell in finding.texts:
            if cell.kind == "pooled":  # its length does not leak
                continue
            for text, reading in zip(WORDS, cell.readings, strict=True):
                assert reading.original == text
                words = text.split()
                assert len(reading.pieces) == len(words)  # special tokens left out
                read = written(reading).split()
                right = [a == b for a, b in zip(read, words, strict=True)]
                assert right == [piece.right for piece in reading.pieces]
                assert reading.exact == all(right)
                assert not reading.verified or reading.exact


def test_a_text_is_exact_only_if_its_characters_came_back():
    """One whole text, one with a word that has no token, one that is cut off."""
    texts = (WORDS[0], "w1 nobody w3", "w7 " * 100)
    subject = replace(target("bert", layers=[1], precisions=("float32",)), texts=texts)
    (finding,) = audit(subject, only=["KH-TEXT-HIDDEN-STATES"]).findings
    whole, unknown, cut = finding.texts[0].readings
    assert [reading.exact for reading in (whole, unknown, cut)] == [True, False, False]
    assert all(reading.verified for reading in (whole, unknown, cut))  # every token is
    assert written(unknown) == "w1 [UNK] w3"
    assert unknown.note == "the tokenizer knows no token for nobody"
    assert cut.note == "cut off after 80 of 102 tokens"
    assert len(cut.pieces) == 78
    assert finding.status is Status.INEXACT
    assert finding.reason.startswith("1 of 3 texts exact and verified")
    assert finding.reason.endswith(f"; {unknown.note}; {cut.note}")


def test_json_and_page_hold_the_texts(audited):
    again = Audit.from_dict(json.loads(json.dumps(audited.to_dict())))
    assert again == audited
    page = report.render(audited)
    assert "by layer and precision" in page
    cells = page.count('<a class="heat-')
    assert cells == sum(len(finding.texts) for finding in audited.findings)
    assert WORDS[0] in page
    assert " verified</p>" in page  # how many, in words: not by colour alone


def test_a_causal_model_skips_what_cannot_be_read():
    audited = audit(target("llama", precisions=("float32",)))
    given = by_name(audited.findings)
    assert {"hidden states of layer 2", "keys and values of layer 0"} <= given.keys()
    rules = ("KH-TEXT-HIDDEN-STATES", "KH-TEXT-KEYS-AND-VALUES")
    hidden = [finding for finding in audited.findings if finding.exposure.rule in rules]
    assert {finding.status for finding in hidden} == {Status.RECOVERED}
    missed = {
        "attention maps",
        "pooled embedding",
        "next-token logits",
        "attention cut",
        "gradient of a batch of texts",
        "attention output before the residual of layer 2",
        "keys and values of layer 1",
    }
    assert set(names(audited.skips)) == missed


def test_layers_by_wish():
    audited = audit(target("bert", layers=[2], precisions=("bfloat16",)))
    hidden = [name for name in names(audited.findings) if "hidden" in name]
    assert hidden == ["hidden states of layer 2"]


LEFT_OUT = {
    "hidden states of layers 2–5, 7–11, it": "3 of 12 layers were tried; --layers all",
    "attention output before the residual of layers 2–12, it": "1 of 12 layers were tried",
}
ALSO = {
    "bert": {
        "keys and values of layers 2–5, 7–12, it": "2 of 12 layers were tried; --layers all",
        "attention maps of layers 3–12, it": "2 of 12 layers were tried; these take longer: "
        "keyhole lab capture --expose maps:3, then",
    },
    "llama": {
        "keys and values of layers 1–4, 6–11, it": "2 of 12 layers were tried; --layers all",
    },
}


@pytest.mark.parametrize("family", ALSO)
def test_layers_that_were_not_tried_are_named(family):
    def left(part, **wishes):
        subject = target(family, 12, **wishes)
        return left_out(part, subject.loaded.model, subject.layers)

    reasons = LEFT_OUT | ALSO[family]
    skips = {words.skip(skip): skip.reason for skip in left("it")}
    assert skips.keys() == reasons.keys()
    for exposure, reason in reasons.items():
        assert skips[exposure].startswith(reason)
    everything = left("it", layers="all")
    assert not any("hidden" in name or "keys" in name for name in names(everything))
    assert "hidden states of layers 1–2, 4–12" in names(left("", layers=[3]))


@pytest.mark.parametrize(
    ("family", "caches"), [("bert", range(1, 3)), ("llama", range(2))]
)
def test_all_layers_by_one_word(family, caches):
    asked = texts.checks("", target(family, layers="all"), seed=0)
    exposures = [check.exposure for check in asked if not check.exposure.variant]
    for rule, layers in (("HIDDEN-STATES", range(1, 3)), ("KEYS-AND-VALUES", caches)):
        tried = [each.layer for each in exposures if each.rule == f"KH-TEXT-{rule}"]
        assert tried == list(layers)


def test_an_audit_says_which_layers_it_left_out(audited):
    reasons = {words.skip(skip): skip.reason for skip in audited.skips}
    assert "keys and values of layer 2" in reasons
    assert "--layers all" in reasons["keys and values of layer 2"]
    assert audited.exit_code == 1
    page = report.render(audited)
    assert "keys and values of layer 2" in page.split('id="skips"')[1]


def test_wrong_wishes():
    with pytest.raises(InputError, match="no texts to read back"):
        TextTarget(target("bert").loaded, ())
    with pytest.raises(InputError, match="precisions must be one or more of"):
        target("bert", precisions=("int3",))
    with pytest.raises(InputError, match="from 0 to 2"):
        audit(target("bert", layers=[7]))


def test_the_classifier_that_ships_gives_its_texts_away():
    demo = load_demo("classification")
    leaks = [leak_of(demo.model, demo.tokenizer, text, "hidden:4") for text in TEXTS]
    degraded = [degrade(leak, "int8") for leak in leaks]
    recoveries = recover_texts(demo.model, demo.tokenizer, degraded)
    assert all(recovery.verified for recovery in recoveries)
    for text, recovery in zip(TEXTS, recoveries, strict=True):
        assert recovery.ids == demo.tokenizer(text)["input_ids"]
    # and it is a classifier
    for recovery, label in zip(recoveries[:2], (1, 0), strict=True):
        assert int(demo.model(torch.tensor([recovery.ids])).logits.argmax()) == label


@dataclass(frozen=True)
class Guess:
    """An attack that guesses the same word everywhere."""

    word: int = 7

    def __call__(self, target, leaks):
        for number, leak in enumerate(leaks):
            known = target.framed(leak.length)
            ids = known.where(known >= 0, self.word).tolist()
            yield number, Proposal(ids)


@pytest.fixture
def guess():
    exposure = Shown("KH-TEXT-HIDDEN-STATES", "guessed")
    row = Row("hidden", False, exposure, "", lambda _: [2])
    ATTACKS.add(Entry("guess", Guess, (row,)))
    yield
    del ATTACKS["guess"]


@pytest.mark.usefixtures("guess")
def test_one_line_adds_an_attack(tmp_path, keyhole):
    subject = target("bert", layers=[2], precisions=("float32",))
    findings = audit(subject, only=["KH-TEXT-HIDDEN-STATES"]).findings
    assert [(finding.exposure.variant, finding.attack) for finding in findings] == [
        ("", "EncoderStates"),
        ("guessed", "Guess"),
    ]
    assert findings[1].status is Status.UNSOLVED
    assert readers("hidden", False) == ["encoder-states", "guess"]
    demo = load_demo()
    leak = leak_of(demo.model, demo.tokenizer, TEXTS[0], "hidden:1")
    leak.save(tmp_path / "leak.safetensors")
    done = keyhole("recover demo leak.safetensors --method guess")
    assert done.returncode == 0, done.stderr
    # a guess explains nothing, and proves nothing of the model
    assert "unsolved" in done.stdout
    assert "leak.safetensors: " in done.stdout


def test_a_models_pooled_embedding_is_read_with_a_corpus_and_short_texts_besides(
    tmp_path,
):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"w{number} w{number + 3}" for number in range(5, 150)))
    subject = replace(
        target("bert", layers=[1], precisions=("float32",)),
        texts=("w30 w31 w32 " * 4,),
        notes=("w40",),
        corpus=corpus,
    )
    (finding,) = audit(subject, only=["KH-TEXT-EMBEDDING"]).findings
    long, short = finding.texts[0].readings
    assert (finding.queries, finding.attack) == (2, "CountedReader")
    assert (long.exact, short.exact, short.original) == (False, True, "w40")
    assert (finding.status, words.outcome(finding)) == (Status.INEXACT, "1 of 2 texts")
    assert "read with counts of the corpus, nothing learnt" in finding.reason
    assert "--corpus FILE, with more texts" in finding.reason
