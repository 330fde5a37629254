"""Text in the audit: every exposure of a model, judged by who knows the text."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models as tiny
from keyhole import report
from keyhole.audit import Audit, audit
from keyhole.audit.texts import PRECISIONS, TextTarget
from keyhole.errors import InputError
from keyhole.invert import recover_texts
from keyhole.models import Loaded, identity
from keyhole.models.demo import TEXTS, load_demo
from keyhole.recover.simulate import degrade, leak_of
from keyhole.results import Status

WORDS = ("w1 w20 w3 w4 w100 w7 w55", "w9 w8 w77 w66 w3 w3 w12 w14")


def target(family, **options):
    model = tiny.model(family, num_hidden_layers=2)
    words = tiny.tokenizer(family in tiny.DECODERS)
    return TextTarget(Loaded(model, words, identity(model), family), WORDS, **options)


@pytest.fixture(scope="module")
def found() -> Audit:
    return audit(models=target("bert"))


def test_hidden_states_keys_and_maps_give_the_text_away(found):
    by_exposure = {finding.exposure: finding for finding in found.findings}
    for name in ("hidden states of layer 1", "hidden states of layer 2",
                 "keys and values of layer 1", "attention maps of layer 1"):  # fmt: skip
        finding = by_exposure[name]
        assert finding.status is Status.RECOVERED, finding.reason
        assert finding.sought == "text"
        assert finding.known == 1.0
    assert {cell.precision for cell in by_exposure["hidden states of layer 1"].texts} == set(
        PRECISIONS
    )
    assert "pooled embedding" in by_exposure


def test_a_reading_says_which_tokens_are_right(found):
    for finding in found.findings:
        for cell in finding.texts:
            for text, reading in zip(WORDS, cell.readings, strict=True):
                assert reading.original == text
                assert len(reading.pieces) == len(text.split())  # special tokens left out
                written = "".join(piece.text for piece in reading.pieces).split()
                right = [a == b for a, b in zip(written, text.split(), strict=True)]
                assert right == [piece.right for piece in reading.pieces]
                assert reading.exact == all(right)
                assert not reading.verified or reading.exact


def test_json_and_page_hold_the_texts(found):
    again = Audit.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    page = report.render(found)
    assert "Text, by exposure, layer and precision" in page
    assert page.count('class="cell') == sum(len(one.texts) for one in found.findings)
    assert WORDS[0] in page


def test_a_causal_model_skips_what_cannot_be_read():
    found = audit(models=target("llama", precisions=("float32",)))
    names = {finding.exposure for finding in found.findings}
    assert {"hidden states of layer 2", "keys and values of layer 0"} <= names
    hidden = [one for one in found.findings if "hidden" in one.exposure or "keys" in one.exposure]
    assert all(one.status is Status.RECOVERED for one in hidden), [one.reason for one in hidden]
    missed = {"attention maps", "pooled embedding", "attention cut"}
    assert {skip.exposure for skip in found.skips} == missed


def test_layers_by_wish():
    found = audit(models=target("bert", layers=[2], precisions=("bfloat16",)))
    hidden = [one.exposure for one in found.findings if "hidden" in one.exposure]
    assert hidden == ["hidden states of layer 2"]


def test_wrong_wishes():
    with pytest.raises(InputError, match="one text or more"):
        TextTarget(target("bert").loaded, ())
    with pytest.raises(InputError, match="precisions among"):
        target("bert", precisions=("int3",))
    with pytest.raises(InputError, match="from 0 to 2"):
        audit(models=target("bert", layers=[7]))


def test_the_classifier_in_the_box_gives_its_texts_away():
    box = load_demo("classification")
    leaks = [leak_of(box.model, box.tokenizer, text, "hidden:4") for text in TEXTS]
    found = recover_texts(box.model, box.tokenizer, [degrade(leak, "int8") for leak in leaks])
    assert all(one.verified for one in found)
    for text, one in zip(TEXTS, found, strict=True):
        assert one.ids == box.tokenizer(text)["input_ids"]
    for one, label in zip(found[:2], (1, 0), strict=True):  # and it is a classifier
        assert int(box.model(torch.tensor([one.ids])).logits.argmax()) == label
