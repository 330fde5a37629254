"""Findings about what a service does not return are hypothetical, and decide nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain

import pytest

from exposures import called
from keyhole import report
from keyhole.assess import Policy, assess, compared, decided, read_policy
from keyhole.core import Fleet, Outcome, Skip, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import RETURNS, RULES, Exposure, is_returned, needs
from keyhole.report import formats, json_form, sarif, terminal, words
from keyhole.report.formats import as_junit
from sample_audits import whole

COUNTED = {  # by hand: which findings of the sample are about what a service returns
    ("labels",): {"signs", "1% of all attention cut"},
    ("scores",): {"full scores", "signs", "1% of all attention cut"},
    ("embeddings",): {"stored embedding"},
    ("hidden-states",): {
        "hidden states of layer 3",
        "stored embedding",
        "a layer's output",
    },
    ("caches", "attention-maps"): {
        "keys and values of layer 1",
        "attention maps of layer 2",
    },
    ("gradients",): set(),
}


def names(items):
    return {words.exposure(item.finding.exposure) for item in items}


@pytest.mark.parametrize("returns", COUNTED, ids=",".join)
def test_what_is_not_returned_is_apart(returns):
    made = assess(whole(), returns=returns)
    every = assess(whole())
    assert names(made.items) == COUNTED[returns]
    assert names(made.hypothetical) == names(every.items) - COUNTED[returns]
    assert sum(card.checked for card in made.families) == len(COUNTED[returns])
    outcomes = {item.finding.outcome for item in made.items}
    given = Outcome.GIVEN_AWAY in outcomes
    assert made.exit_code == (
        1 if given else 3
    )  # a skip of the sample could not be checked
    assert decided(made, Policy()).exit_code == made.exit_code


def test_an_audit_says_it_by_itself_and_a_policy_says_otherwise():
    audit = replace(whole(), returns=("labels",))
    assert names(assess(audit).items) == COUNTED[("labels",)]
    assert (
        names(assess(audit, returns=("embeddings",)).items) == COUNTED[("embeddings",)]
    )
    again = type(audit).from_dict(json.loads(json.dumps(audit.to_dict())))
    assert again == audit


def test_what_was_seen_is_never_hypothetical():
    seen = tuple(replace(finding, observed=True) for finding in whole().findings)
    made = assess(replace(whole(), findings=seen), returns=("gradients", "labels"))
    assert made.hypothetical == ()
    assert made.exit_code == 1
    note = (
        "Said to return gradients, labels, but scores, embeddings, hidden-states, caches were seen "
        "as well, and count."
    )
    assert words.assumed(made) == note
    assert note in formats.FORMATS["html"](made)


def test_an_audit_and_a_fleet_count_what_their_assessments_count():
    of_labels = replace(whole(), returns=("labels",))
    made = assess(of_labels)
    assert of_labels.exposed == len(made.exposed)
    assert len(of_labels.attacks) == len(made.items)
    hidden = replace(
        whole(), findings=whole().findings[3:4], skips=()
    )  # hidden states alone
    fleet = Fleet({"all": hidden, "labels": replace(hidden, returns=("labels",))})
    assert [audit.exit_code for audit in fleet.audits.values()] == [1, 3]
    summary = fleet.summary().splitlines()
    assert summary[0].startswith(
        "2 targets: 1 give something away, 1 could not be checked, 0 "
    )
    assert summary[1:] == ["  all: 1 of 1 exposures", "  labels: 0 of 0 exposures"]


def test_nothing_that_is_returned_was_checked():
    made = assess(replace(whole(), skips=()), returns=("gradients",))
    assert (
        made.verdict
        == "Nothing was checked: no attack reads what is returned (gradients)."
    )
    judged = decided(made, Policy())
    assert judged.decision is not None
    assert judged.exit_code == 3
    assert judged.decision.rule == "no check is about what is returned (gradients)"
    assert decided(made, Policy(allow_unchecked=True)).exit_code == 0


def test_what_could_not_be_checked_and_is_not_returned_does_not_count():
    kept = replace(whole().findings[1], status=Status.UNSOLVED)  # of labels
    skip = Skip(called("hidden states of layer 1"), "none", "no memory", unchecked=True)
    audit = replace(whole(), findings=(kept,), skips=(skip,))
    assert assess(audit).exit_code == 3
    made = assess(audit, returns=("labels",))
    assert (
        made.exit_code,
        decided(made, Policy()).exit_code,
        made.audit.unchecked,
    ) == (0, 0, 0)


def test_a_baseline_is_read_with_the_same_eyes():
    made = assess(whole(), returns=("labels",))
    both = compared(made, assess(whole(), returns=("labels",)))
    assert (both.gone, both.untried) == ((), ())
    assert {item.state.value for item in both.items} == {"same"}


def test_every_format_shows_it_apart():
    made = decided(assess(whole(), returns=("labels",)), Policy())
    apart = names(made.hypothetical)
    assert apart
    document = json_form.document(made)["assessment"]
    assert {row["exposure"] for row in document["hypothetical"]} == apart
    assert (document["returns"], document["assumed"]) == (["labels"], "")
    results = json.loads(sarif.render(made))["runs"][0]["results"]
    kinds = [result["kind"] for result in results]
    assert kinds.count("informational") == len(apart)
    alerts = json.loads(sarif.render_alerts(made))["runs"][0]["results"]
    assert "informational" not in {result["kind"] for result in alerts}
    assert as_junit(made).count("the service does not return it") == len(apart)
    shown = "Hypothetical: not returned, where labels are"
    assert shown in formats.FORMATS["html"](made)
    assert "hypothetical: the service does not return it" in formats.FORMATS[
        "markdown"
    ](made)
    assert terminal.table(made) is not None


def test_without_it_the_audit_says_what_it_assumed():
    note = words.assumed(assess(whole()))
    assert note.startswith(
        "Assumed that your service returns all that was looked at: labels, "
    )
    assert "gradients" not in note  # nothing was looked at
    assert words.assumed(assess(whole(), returns=("labels",))) == ""
    assert note in report.render(whole())


def test_names_are_known_and_every_rule_but_three_needs_one(tmp_path):
    for name in chain(RETURNS, *RETURNS.values()):
        assert is_returned(Exposure("KH-TEXT-ANSWERS"), [name])
    free = {rule.id for rule in RULES if needs(Exposure(rule.id)) is None}
    assert free == {
        rule.id for rule in RULES if rule.id.endswith(("-OTHER", "-ANSWERS"))
    }
    path = tmp_path / "keyhole.toml"
    path.write_text('returns = ["labels", "embeddings"]\n')
    assert read_policy(path).returns == ("labels", "embeddings")
    path.write_text('returns = ["label"]\n')
    with pytest.raises(
        InputError, match=r"returns of .* takes labels, scores, .*, got label"
    ):
        read_policy(path)
