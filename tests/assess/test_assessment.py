"""Stable ids, cards that agree with the findings, and the verdict."""

from __future__ import annotations

from dataclasses import replace

from test_severity import finding

from exposures import called
from keyhole import disrupt, extract, invert, recover
from keyhole.assess import RULES, Family, Level, Severity, assess, assess_fleet
from keyhole.assess.assessment import ids
from keyhole.core import Audit, Finding, Fleet, Skip, Status
from keyhole.core.exposure import NOT_CHECKED
from keyhole.report import words


def audit(*findings: Finding, skips: tuple[Skip, ...] = ()) -> Audit:
    return Audit("a target", "its identity", findings, skips)


def test_every_exposure_of_the_registries_has_words_and_a_rule():
    registries = (
        extract.registry.METHODS,
        invert.registry.METHODS,
        recover.registry.ATTACKS,
        disrupt.registry.ATTACKERS,
    )
    for registry in registries:
        for _, row in registry.rows():
            exposure = row.exposure
            assert (
                exposure.rule,
                exposure.variant,
                *exposure.defences,
            ) in words.EXPOSURES
    assert {key[0] for key in words.EXPOSURES} <= {
        *(rule.id for rule in RULES),
        NOT_CHECKED,
    }
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_ids_are_of_what_a_finding_is_about_and_do_not_move():
    first, second = (
        finding(exposure=called("full scores", part)) for part in ("the head", "b")
    )
    assert ids([first, second]) == [
        "weights-the-head-scores-full",
        "weights-b-scores-full",
    ]
    assert ids([second, first]) == [
        "weights-b-scores-full",
        "weights-the-head-scores-full",
    ]
    cache = finding("text", exposure=called("keys and values of layer 1, rotated"))
    assert ids([cache]) == ["text-keys-and-values-layer-1-rotated"]


def test_an_attack_that_came_to_nothing_moves_no_id():
    first = finding(attack="A")
    second = finding(attack="B")
    failed = Skip(second.exposure, "B", "no answer", unchecked=True)
    assert (
        ids([first, second])[:1] == ids([first], [failed]) == ["weights-scores-full-a"]
    )
    part = replace(
        failed, attack="none"
    )  # of one attack, such as on some vectors of a store
    assert ids([first], [part]) == ["weights-scores-full"]


def test_ids_are_never_the_same():
    same = [
        finding(),
        finding(attack="Other"),
        finding(),
        finding(exposure=called("模型")),
        finding(),
    ]
    named = ids([*same, finding(exposure=called("full singlehead 2"), attack="x")])
    assert len(set(named)) == len(named)
    assert named[3] == "weights-other-模型"


def test_an_override_sets_a_severity_and_cannot_hide_what_nobody_knows():
    given = finding()
    unknown = finding(exposure=called("signs"), status=Status.BUDGET)
    lowered = assess(audit(given, unknown), override=lambda *_: Severity.LOW)
    assert [item.severity for item in lowered.items] == [Severity.LOW, Severity.UNKNOWN]
    assert "set to low" in lowered.items[0].why


def test_items_stand_worst_first_and_controls_apart():
    flips = finding(
        "prediction",
        exposure=called("1% of all attention cut"),
        known=0.3,
        status=Status.INEXACT,
    )
    control = replace(
        flips, exposure=called("1% of all attention cut at random"), control=True
    )
    text = finding("text", exposure=called("hidden states of layer 1"))
    seen = assess(audit(flips, control, text))
    assert [item.finding for item in seen.items] == [text, flips]
    assert [item.finding for item in seen.controls] == [control]
    assert seen.severity is Severity.CRITICAL
    assert card(seen, Family.PREDICTIONS).checked == 1


def card(assessment, family):
    return next(each for each in assessment.families if each.family is family)


def test_cards_say_how_bad_and_which_fix_serves_most():
    first = finding(remedy="return labels", exposure=called("full scores", "a"))
    two = finding(
        remedy="return labels", exposure=called("full scores", "b"), queries=10
    )
    three = finding(
        remedy="something else",
        exposure=called("full scores", "c"),
        status=Status.INEXACT,
        known=0.2,
    )
    weights = card(assess(audit(first, two, three)), Family.WEIGHTS)
    assert (weights.level, weights.exposed, weights.checked) == (Level.ALL, 3, 3)
    assert weights.worst is not None
    assert weights.worst.finding == two  # the cheaper of two that are equally bad
    assert (weights.fix, weights.fixes) == ("return labels", 2)
    partly = card(assess(audit(three)), Family.WEIGHTS)
    assert partly.level is Level.PARTLY
    assert card(assess(audit(three)), Family.TEXT).level is Level.NOT_TRIED
    kept = assess(audit(finding(status=Status.UNSOLVED)))
    assert card(kept, Family.WEIGHTS).level is Level.NONE
    unknown = assess(audit(finding(status=Status.BUDGET)))
    assert card(unknown, Family.WEIGHTS).level is Level.UNKNOWN


def test_the_verdict_is_one_line():
    text = finding("text", exposure=called("hidden states of layer 1"))
    flips = finding(
        "prediction",
        exposure=called("1% of all attention cut"),
        known=0.3,
        status=Status.INEXACT,
    )
    both = assess(audit(finding(), text, flips)).verdict
    assert both == (
        "The weights can be copied, text can be read back and some predictions can be flipped."
    )
    part = assess(audit(finding(status=Status.INEXACT, known=0.4))).verdict
    assert part == "The weights can be copied in part."
    kept = finding(status=Status.UNSOLVED)
    clean = assess(audit(kept)).verdict
    assert clean == "Nothing was given away: the attack that was tried failed."
    missing = Skip(called("the text"), "x", "no weights", unchecked=True)
    assert "not a clean bill" in assess(audit(kept, skips=(missing,))).verdict
    assert assess(audit(skips=(missing,))).verdict.startswith("Could not check")
    assert assess(audit()).verdict.startswith("Nothing was checked")
    assert (
        "1 of 2 checks had no result"
        in assess(audit(finding(), skips=(missing,))).verdict
    )


def test_the_verdict_of_a_fleet_counts_no_hypothetical_findings():
    given = audit(finding())
    kept = audit(finding(status=Status.UNSOLVED))
    plain = assess_fleet(Fleet({"a": given, "b": kept})).verdict
    assert plain == "Of 2 targets 1 gives something away, 1 gives nothing away."
    fleet = Fleet({"a": replace(given, returns=("embeddings",))})
    assert assess_fleet(fleet).verdict == "Of 1 target 1 could not be checked."


def test_the_severity_is_never_none_where_something_could_not_be_checked():
    kept = finding(status=Status.UNSOLVED)
    missing = Skip(called("the text"), "x", "no weights", unchecked=True)
    assert assess(audit(kept)).severity is Severity.NONE
    assert assess(audit(kept, skips=(missing,))).severity is Severity.UNKNOWN
    assert (
        assess(
            audit(kept, skips=(Skip(called("the text"), "x", "none here"),))
        ).severity
        is Severity.NONE
    )
    assert assess(audit()).severity is Severity.UNKNOWN
