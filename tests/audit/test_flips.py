"""Flips in the audit: every attacker judged, drawn on the sentence, and escaped."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

import tiny_classifiers
import tiny_models as tiny
from exposures import names
from keyhole import report
from keyhole.audit import Audit, audit, flips
from keyhole.audit.check import joined
from keyhole.audit.texts import TextTarget
from keyhole.core import Finding, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Cut
from keyhole.core.progress import untracked
from keyhole.core.registry import Entry
from keyhole.data import encode
from keyhole.disrupt import (
    ATTACKERS,
    Control,
    Disruption,
    HackAttend,
    Outcome,
    Rerank,
)
from keyhole.disrupt.registry import Row
from keyhole.models.demo import EXAMPLES, load_demo
from keyhole.report import words
from keyhole.report.page import picture

HOSTILE = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"


def target(**options):
    model = tiny_classifiers.model(seed=2, labels=2).eval().requires_grad_(False)
    loaded = tiny.loaded(model)
    examples = options.pop("examples", tiny_classifiers.examples(6))
    return TextTarget(
        loaded, [example.text for example in examples], examples=examples, **options
    )


def checked(asked, seed=0):
    """What all the checks of a model's predictions give."""
    return joined(check.run(untracked) for check in flips.checks("", asked, seed))


@pytest.fixture
def easily(monkeypatch):
    """A larger share: eight words leave 1% of a head no unit at all."""
    usual = flips.attackers
    monkeypatch.setattr(flips, "attackers", lambda seed, _: usual(seed, 0.2))


def test_every_attacker_has_a_finding_that_the_model_itself_confirms(easily):
    asked = target()
    found = checked(asked)
    assert names(found.findings) == [
        "20% of each head's attention cut",
        "20% of all attention cut",
        "20% of each head's attention cut, as released",
        "20% of each head's attention cut at random",
    ]
    batch, labels = encode(asked.loaded.tokenizer, asked.examples)
    batch.pop("special_tokens_mask")
    right = int((asked.loaded.model(**batch).logits.argmax(-1) == labels).sum())
    for finding in found.findings:
        assert finding.sought == "prediction"
        flipped = round(finding.known * right)
        assert finding.reason.startswith(f"{flipped} of {right} right answers flipped")
        assert finding.exposed == (flipped > 0)
        assert len(finding.cuts) == min(flipped, flips.SHOWN)
        assert (finding.status is Status.RECOVERED) == (flipped == right)
    assert any(each.cuts for each in found.findings)
    for finding in found.findings:
        for cut in finding.cuts:
            assert cut.before != cut.after
            assert cut.tokens[0] == "[CLS]"
            for layer, head, query, key in cut.units:
                assert layer < cut.layers == 2
                assert head < cut.heads == 4
                assert 0 < query < len(cut.tokens) - 1  # special tokens are spared
                assert 0 < key < len(cut.tokens) - 1


@dataclass(frozen=True)
class Whole:
    """A dummy attacker: says that all attention was cut, and that every answer flipped."""

    words = "all of it cut"
    control = False
    seed: int = 0

    def __call__(self, model, batch, labels=None, *, ids=()):
        outcomes = [
            Outcome(
                name, True, True, (int(label),), (1 - int(label),), 0.9, 0.1, queries=1
            )
            for name, label in zip(ids, labels, strict=True)
        ]
        return Disruption({}, tuple(outcomes), Control(0.0, 0.0, 0), 0.0)


def test_an_attacker_in_one_line_is_in_the_audit():
    ATTACKERS.add(
        Entry("whole", Whole, (Row(Exposure("KH-PREDICTIONS-CUTS", "everything")),))
    )
    try:
        findings = checked(target(), seed=3).findings
    finally:
        del ATTACKERS["whole"]
    assert findings[-1].exposure == Exposure("KH-PREDICTIONS-CUTS", "everything")
    assert findings[-1].attack == "Whole"
    assert findings[-1].reason.startswith("6 of 6 right answers flipped")
    assert findings[-1].queries == 6
    assert len(findings) == 5


def test_the_audit_tries_what_the_registry_says():
    made = [attacker for _, _, attacker in flips.attackers(seed=7)]
    assert made == [
        HackAttend(schedule=Rerank(prefixes=8, refine=4), seed=7),
        HackAttend(schedule=Rerank(prefixes=8, refine=4), scope="model", seed=7),
        HackAttend.as_released(seed=7),
        HackAttend.as_released(
            ranking="random", order="random", spare="special", seed=7
        ),
    ]
    assert [attacker.control for attacker in made] == [False, False, False, True]


def test_without_labels_the_models_own_answers_count(easily):
    asked = target(
        examples=[
            replace(example, label=-1) for example in tiny_classifiers.examples(3)
        ]
    )
    for finding in checked(asked).findings:
        assert " of 3 right answers flipped" in finding.reason
    bare = replace(asked, examples=())
    assert " of 3 right" in checked(bare).findings[0].reason


def test_the_hardened_model_stands_next_to_it(easily):
    asked = target()
    hardened = replace(asked.loaded, name="the hardened model")
    found = checked(replace(asked, hardened=hardened)).findings[0]
    first, second = found.reason.split("; of the hardened model: ")
    assert (
        first.split(" right")[0] == second.split(" (")[0]
    )  # the same model, so the same figures


def test_a_model_without_a_head_is_skipped_and_wrong_labels_are_said():
    bare = tiny.model("bert")
    loaded = tiny.loaded(bare, name="bert")
    skipped = checked(TextTarget(loaded, ["w1 w2"]))
    assert skipped.findings == ()
    assert "BertModel has no head for classes or text" in skipped.skips[0].reason
    with pytest.raises(InputError, match="labels 0 to 1, not 4"):
        checked(target(examples=[tiny_classifiers.Example("a", 4, "w1")]))


def test_none_right_is_not_a_clean_bill():
    asked = target(examples=tiny_classifiers.examples(2))
    batch, _ = encode(asked.loaded.tokenizer, asked.examples)
    batch.pop("special_tokens_mask")
    answers = asked.loaded.model(**batch).logits.argmax(-1).tolist()
    wrong = [
        replace(example, label=1 - answer)
        for example, answer in zip(asked.examples, answers, strict=True)
    ]
    found = checked(replace(asked, examples=wrong)).findings[0]
    assert found.status is Status.NOT_APPLICABLE
    assert found.reason == "the model gets none of 2 right"
    assert words.outcome(found) == "could not check"


def test_json_page_and_verdict(easily):
    found = checked(target())
    made = Audit("t", "t", found.findings)
    assert Audit.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    page = report.render(made)
    exposed = sum(each.exposed for each in found.findings)
    assert f"{exposed} of 3 checks exposed" in page
    cuts = [cut for each in found.findings for cut in each.cuts]
    touched = [{(layer, head) for layer, head, _, _ in cut.units} for cut in cuts]
    assert page.count('class="unit"') == sum(len(heads) for heads in touched)
    layers = [len({layer for layer, _ in heads}) for heads in touched]
    frames = sum(count * cut.heads for count, cut in zip(layers, cuts, strict=True))
    assert page.count('class="frame"') == frames


def test_hostile_tokens_are_escaped():
    cut = Cut((HOSTILE, "b"), HOSTILE, HOSTILE, 0.9, 0.1, 0.01, 1, 1, ((0, 0, 0, 1),))
    finding = Finding(
        Exposure("KH-PREDICTIONS-CUTS"),
        "HackAttend",
        Status.INEXACT,
        "",
        "",
        None,
        1,
        0.0,
        cuts=(cut,),
    )
    page = report.render(Audit("t", "t", (finding,)))
    assert "<script>window" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page


def test_a_picture_places_each_unit_in_its_head():
    units = ((0, 0, 0, 0), (2, 2, 3, 1), (2, 2, 3, 2), (2, 2, 0, 3))
    drawn = picture(Cut(tuple("abcd"), "n", "p", 0.9, 0.1, 0.01, 3, 3, units))
    assert [layer for _, layer in drawn.down] == [1, 3]  # nothing was cut of the second
    assert len(drawn.heads) == 6
    assert {head.size for head in drawn.heads} == {4 * drawn.cell}
    first = drawn.heads[0]
    last = drawn.heads[-1]
    assert (first.path, last.path) == (
        "M0 0.5h1",
        "M3 0.5h1M1 3.5h2",
    )  # key, query, how many keys
    assert last.x + last.size <= drawn.width
    assert last.y + last.size <= drawn.height
    assert last.title == "layer 3, head 3: d → b, d → c, a → d"
    assert sum(bool(head.path) for head in drawn.heads) == 2


def test_a_cut_outside_the_model_is_refused():
    for unit in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 2, 0), (0, 0, 0, -1)):
        with pytest.raises(InputError, match="1 layers, 1 heads and 2 tokens"):
            Cut(("a", "b"), "n", "p", 0.9, 0.1, 0.01, 1, 1, (unit,))


def test_a_model_that_hides_its_attention_is_skipped(monkeypatch):
    def refuse(*_, **__):
        raise InputError("expected attention that can be reached, got none")

    monkeypatch.setattr(HackAttend, "__call__", refuse)
    found = checked(target())
    assert found.findings == ()
    (skip,) = found.skips  # said once, and not by every attacker
    assert "can be reached" in skip.reason


def test_the_box_gets_its_examples_right_and_some_flip():
    box = load_demo("classification")
    batch, labels = encode(box.tokenizer, EXAMPLES)
    batch.pop("special_tokens_mask")
    with torch.no_grad():
        assert (box.model(**batch).logits.argmax(-1) == labels).all()
    target = TextTarget(box, ["a"], [1], ("float32",), EXAMPLES[3:6])
    found = audit(target, only=["predictions"])
    rates = [each.known for each in found.findings if each.sought == "prediction"]
    assert rates[0] > 0
    assert rates[1] > 0
    assert rates[3] == 0
