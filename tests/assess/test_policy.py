"""Twenty policies on ten audits: exit codes and rules, compared with a second implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import pytest
from test_severity import cell, finding

from exposures import called
from keyhole.assess import (
    Policy,
    Ruling,
    State,
    assess,
    compared,
    decided,
    find_policy,
    read_policy,
)
from keyhole.assess.assessment import SLACK, state
from keyhole.assess.policy import condition
from keyhole.core import Audit, Finding, Skip, Status
from keyhole.core.errors import InputError

TODAY = date(2026, 11, 16)


def failing(decision):
    return [ruled for ruled in decision.rulings if ruled.ruling is Ruling.FAILS]


def of(*findings: Finding, skips: tuple[Skip, ...] = ()) -> Audit:
    return Audit("a target", "its identity", findings, skips)


# Points by hand: weights 3 + all 3 + cheap 2 + proved 1 = 9; text in part 4 + 1 + 2 + 0
# = 7; flips of 30% 2 + 1 + 2 + 1 = 6.
WEIGHTS = finding()
DEAR = finding(queries=2_000_000, status=Status.INEXACT, known=0.2)  # 3 + 1 + 0 + 0 = 4
PART = finding(
    "text",
    exposure=called("hidden states of layer 3"),
    status=Status.INEXACT,
    known=0.3,
)
FLIPS = finding(
    "prediction",
    exposure=called("1% of all attention cut"),
    status=Status.INEXACT,
    known=0.3,
)
KEPT = finding(
    "text",
    exposure=called("keys and values of layer 1"),
    status=Status.UNSOLVED,
    known=0.08,
)
UNKNOWN = finding(
    "input", exposure=called("a layer's output"), status=Status.BUDGET, known=0.0
)
CONTROL = replace(
    FLIPS, exposure=called("1% of all attention cut at random"), control=True, known=1.0
)
MISSING = Skip(called("the text"), "none", "no weights", unchecked=True)
AUDITS = {
    "weights": of(WEIGHTS),
    "dear": of(DEAR),
    "part": of(PART, KEPT),
    "flips": of(FLIPS, CONTROL),
    "kept": of(KEPT),
    "unknown": of(UNKNOWN),
    "both": of(WEIGHTS, UNKNOWN),
    "skipped": of(KEPT, skips=(MISSING,)),
    "nothing": of(),
    "control": of(CONTROL, KEPT),
}
IGNORE = '[[ignore]]\nfinding = "{}"\nreason = "accepted"\nuntil = {}\n'


def given(f: Finding) -> bool:
    return f.status in (Status.RECOVERED, Status.INEXACT)


def points(f: Finding) -> int:
    """The points as the documents define them, written independently of the code."""
    lost = {"text": 4, "input": 4, "weights": 3, "prediction": 2}[f.sought]
    if f.status is Status.RECOVERED or f.known >= 0.99:
        much = 3
    elif f.known >= 0.5:
        much = 2
    else:
        much = 1
    if f.queries <= 10_000:
        cheap = 2
    elif f.queries <= 1_000_000:
        cheap = 1
    else:
        cheap = 0
    proved = f.status is Status.RECOVERED or f.sought == "prediction"
    return lost + much + cheap + proved


def anything(f: Finding) -> bool:
    return given(f)


def nothing(f: Finding) -> bool:
    return False


@dataclass(frozen=True)
class Expected:
    """The expected exit code of each audit above, and the policy as a function."""

    codes: str
    fails: object
    allowed: bool = False  # what could not be checked
    ignored: bool = False  # everything
    rule: str = ""  # words of the explanation where it fails

    def code(self, audit: Audit) -> int:
        counted = [f for f in audit.findings if not f.control]
        left = [] if self.ignored else counted
        if any(self.fails(f) for f in left):
            return 1
        unknown = sum(f.status is Status.BUDGET for f in left)
        unknown += sum(skip.unchecked for skip in audit.skips if not self.ignored)
        total = len(counted) + sum(skip.unchecked for skip in audit.skips)
        if not total or (unknown and not self.allowed) or unknown == total:
            return 3
        return 0


POLICIES = {
    "allow-unchecked = false": Expected("1111031330", anything, rule="fail-on low"),
    'fail-on = ["critical"]': Expected(
        "1000031330", lambda f: given(f) and points(f) >= 9
    ),
    'fail-on = ["high"]': Expected("1010031330", lambda f: given(f) and points(f) >= 7),
    'fail-on = "medium"': Expected("1011031330", lambda f: given(f) and points(f) >= 5),
    'fail-on = ["low"]': Expected("1111031330", lambda f: given(f) and points(f) >= 1),
    "fail-on = []": Expected("0000033330", nothing),
    'fail-on = ["weights"]': Expected(
        "1100031330", lambda f: given(f) and f.sought == "weights"
    ),
    'fail-on = ["text"]': Expected(
        "0010033330", lambda f: given(f) and f.sought == "text"
    ),
    'fail-on = ["predictions", "inputs"]': Expected(
        "0001033330",
        lambda f: given(f) and f.sought in ("prediction", "input"),
        rule="fail-on predictions",
    ),
    'fail-on = ["KH-WEIGHTS-SCORES"]': Expected(
        "1100031330", lambda f: given(f) and f.exposure.rule == "KH-WEIGHTS-SCORES"
    ),
    'fail-on = ["KH-TEXT-*"]': Expected(
        "0010033330", lambda f: given(f) and f.sought == "text"
    ),
    'fail-on = ["text-hidden-states-layer-3"]': Expected(
        "0010033330", lambda f: given(f) and f.exposure == PART.exposure
    ),
    'fail-on = ["text.share > 0.05"]': Expected(
        "0010133131", lambda f: f.sought == "text" and f.known > 0.05
    ),
    'fail-on = ["text.share > 0.1"]': Expected(
        "0010033330", lambda f: f.sought == "text" and f.known > 0.1
    ),
    'fail-on = ["predictions.exact >= 0.3"]': Expected(
        "0001033330", lambda f: f.sought == "prediction" and f.known >= 0.3
    ),
    'fail-on = ["weights.queries <= 10000"]': Expected(
        "1000031330", lambda f: f.sought == "weights" and f.queries <= 10_000
    ),
    'fail-on = ["weights.error < 1e-12", "flips-*"]': Expected(
        "1100031330",
        lambda f: f.sought == "weights" and f.error < 1e-12,
        rule="fail-on weights.error < 1e-12",
    ),
    "allow-unchecked = true": Expected(
        "1111031030", anything, allowed=True, rule="fail-on low"
    ),
    '[severity]\nKH-WEIGHTS-SCORES = "none"\n': Expected(
        "0011033330", lambda f: given(f) and f.sought != "weights", rule="fail-on low"
    ),
    IGNORE.format("KH-*", "2026-11-16"): Expected("0000000030", anything, ignored=True),
    IGNORE.format("KH-*", "2026-11-15"): Expected(
        "1111031330",
        anything,
        rule="fail-on low (ignored until 2026-11-15, which has passed)",
    ),
}


def written(folder: Path, words: str) -> Policy:
    path = folder / "keyhole.toml"
    path.write_text(words, "utf-8")
    return read_policy(path)


@pytest.mark.parametrize("words", POLICIES)
@pytest.mark.parametrize(("place", "name"), list(enumerate(AUDITS)))
def test_exit_codes_are_those_of_the_table_and_of_a_second_count(
    tmp_path, words, place, name
):
    expected = POLICIES[words]
    audit = AUDITS[name]
    decision = decided(
        assess(audit, override=(policy := written(tmp_path, words)).severity),
        policy,
        TODAY,
    ).decision
    assert decision is not None
    assert str(decision.exit_code) == expected.codes[place]
    assert decision.exit_code == expected.code(audit)
    if decision.exit_code == 1:
        rule = (
            expected.rule
            or f"fail-on {words.partition('=')[2].strip(' []').strip(chr(34))}"
        )
        assert rule in decision.rule
        assert all(rule in ruled.rule for ruled in failing(decision))
    assert {ruled.finding for ruled in decision.rulings} == {
        *(item.id for item in assess(audit).items),
        *(skip.exposure.id for skip in audit.skips),
    }


@pytest.mark.parametrize(
    "name", ["KH-*", "*-SCORES", "KH-NOT-CHECKED", "text-hidden-*", "*"]
)
def test_ids_of_findings_and_patterns_of_rules_are_accepted(tmp_path, name):
    words = f'fail-on = ["{name}"]\n' if "-" in name else ""
    words += f'[severity]\n"{name}" = "low"\n{IGNORE.format(name, "2027-01-31")}'
    assert dict(written(tmp_path, words).severities) == {name: "low"}


def test_an_ignore_says_why_and_until_when(tmp_path):
    policy = written(tmp_path, IGNORE.format("weights-scores-full", "2027-01-31"))
    judged = decided(assess(AUDITS["weights"]), policy, TODAY)
    assert judged.items[0].ignored is not None
    assert judged.items[0].ignored.reason == "accepted"
    assert judged.decision is not None
    assert judged.decision.rulings[0].rule == "until 2027-01-31: accepted"
    assert judged.decision.rule == "no finding fails (1 ignored)"


def test_ignoring_one_of_the_checks_without_a_result_makes_no_result(tmp_path):
    for ignored in ("inputs-layer-output", "text-other"):
        words = f"allow-unchecked = true\n{IGNORE.format(ignored, '2027-01-31')}"
        judged = decided(
            assess(of(UNKNOWN, skips=(MISSING,))), written(tmp_path, words), TODAY
        )
        rulings = {ruled.ruling.value for ruled in judged.decision.rulings}
        assert rulings == {"ignored", "could not check"}
        assert judged.decision.exit_code == 3
        assert "no check came to a result" in judged.decision.rule


def test_what_was_skipped_is_ignored_by_the_id_of_its_exposure(tmp_path):
    policy = written(tmp_path, IGNORE.format("text-other", "2027-01-31"))
    judged = decided(assess(AUDITS["skipped"]), policy, TODAY)
    assert judged.decision is not None
    assert judged.decision.exit_code == 0


ENVIRONMENTS = """
fail-on = ["critical"]
[severity]
KH-TEXT-HIDDEN-STATES = "low"
[[ignore]]
finding = "weights-*"
reason = "planted"
until = 2027-01-01
[environment.production]
fail-on = ["low"]
[environment.production.severity]
"text-*" = "critical"
[[environment.production.ignore]]
finding = "predictions-*"
reason = "no masks are taken"
until = 2027-01-01
[environment.laboratory]
allow-unchecked = true
"""


def test_an_environment_replaces_what_fails_and_adds_to_the_rest(tmp_path):
    plain = written(tmp_path, ENVIRONMENTS)
    assert [str(condition) for condition in plain.fail_on] == ["critical"]
    assert len(plain.ignores) == 1
    production = read_policy(tmp_path / "keyhole.toml", "production")
    assert [str(condition) for condition in production.fail_on] == ["low"]
    assert len(production.ignores) == 2
    assert dict(production.severities) == {
        "text-*": "critical",
        "KH-TEXT-HIDDEN-STATES": "low",
    }
    assert "production" in production.source
    laboratory = read_policy(tmp_path / "keyhole.toml", "laboratory")
    assert laboratory.allow_unchecked
    with pytest.raises(
        InputError, match="no environment staging; it has production, laboratory"
    ):
        read_policy(tmp_path / "keyhole.toml", "staging")


@pytest.mark.parametrize(
    ("production", "expected"),
    [
        ('KH-TEXT-EMBEDDING = "medium"', "medium"),
        ('"text-*" = "critical"', "critical"),
        ('KH-TEXT-OTHER = "high"', "low"),
    ],
)
def test_severities_of_an_environment_win(tmp_path, production, expected):
    base = '[severity]\nKH-TEXT-EMBEDDING = "low"\n'
    written(tmp_path, f"{base}[environment.production.severity]\n{production}\n")
    policy = read_policy(tmp_path / "keyhole.toml", "production")
    embedding = finding("text", exposure=called("pooled embedding"))
    (item,) = assess(of(embedding), policy.severity).items
    assert item.severity == expected


@pytest.mark.parametrize("wildcard", ["*", "KH-*", "text-*", "KH-TEXT-*"])
@pytest.mark.parametrize("exact", ["KH-TEXT-EMBEDDING", "text-embedding"])
@pytest.mark.parametrize("exact_first", [True, False])
def test_an_id_comes_before_a_wildcard(tmp_path, wildcard, exact, exact_first):
    lines = [f'"{exact}" = "critical"\n', f'"{wildcard}" = "low"\n']
    words = "[severity]\n" + "".join(lines if exact_first else reversed(lines))
    embedding = finding("text", exposure=called("pooled embedding"))
    (item,) = assess(of(embedding), written(tmp_path, words).severity).items
    assert item.severity == "critical"


def test_a_policy_is_found_in_its_folder(tmp_path):
    assert find_policy(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_policy(tmp_path) is None
    with pytest.raises(InputError, match=r"\[tool.keyhole\]"):
        read_policy(tmp_path / "pyproject.toml")
    (tmp_path / "model").mkdir()
    words = '[tool.keyhole]\ntargets = ["model", "demo"]\ndata = "texts.tsv"\n'
    (tmp_path / "pyproject.toml").write_text(words)
    found = find_policy(tmp_path)
    assert found == tmp_path / "pyproject.toml"
    policy = read_policy(found)
    assert policy.targets == (str(tmp_path / "model"), "demo")
    (tmp_path / "keyhole.toml").write_text("fail-on = []\n")
    assert find_policy(tmp_path) == tmp_path / "keyhole.toml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "is empty"),
        ("fail-on = [", "TOML"),
        ('fail_on = ["high"]', "did you mean fail-on"),
        ('fail-on = ["severe"]', "a severity"),
        ('fail-on = ["none"]', "a severity"),
        ('fail-on = ["text.exactness > 1"]', "a figure"),
        ('fail-on = ["words.exact > 1"]', "a family"),
        ('fail-on = ["text.exact > many"]', "a number"),
        ('fail-on = ["text.exact > nan"]', "a number"),
        ("fail-on = [1]", r"fail-on\[0\] as a valid string, got 1"),
        ("fail-on = 1", "fail-on as a valid array, got 1"),
        ("data = 1", "data as a valid string"),
        ("allow-unchecked = 1", "a valid boolean"),
        ("severity = 1", "severity as an object"),
        ('[severity]\nKH-TEXT-OTHER = "unknown"', "cannot be unknown"),
        ('[severity]\nKH-X = ["low"]', "'none', 'unknown', 'low'"),
        ("[severity]\nKH-X = {a = 1}", "'none', 'unknown', 'low'"),
        (
            'fail-on = ["KH-TEXT-HIDEN-STATES"]',
            "fail-on names KH-TEXT-HIDEN-STATES, which matches",
        ),
        (
            'fail-on = ["kh-text-hidden-states"]',
            "fail-on names kh-text-hidden-states, which",
        ),
        ('[severity]\n"KH-TXT-*" = "low"', r"severity names KH-TXT-\*"),
        (
            IGNORE.format("KH-TEXT", "2027-01-01"),
            r"\[\[ignore\]\] of .* names KH-TEXT, which",
        ),
        ("ignore = 1", "ignore as a valid array"),
        ("ignore = [1]", r"ignore\[0\] as an object"),
        ('[[ignore]]\nfinding = "x"', r"ignore\[0\]\.reason is missing"),
        ('[[ignore]]\nfinding = "x"\nreason = " "\nuntil = 2027-01-01', "a reason"),
        (
            '[[ignore]]\nfinding = "x"\nreason = "y"\nuntil = "soon"',
            "until as a valid date",
        ),
        (
            '[[ignore]]\nfinding = "x"\nreason = "y"\nuntil = 2027-01-01T00:00:00',
            "until as a valid date",
        ),
        ("environment = 1", "environment as an object"),
        ("[environment.a]\nfail = 1", "fail has no meaning"),
        ("[environment.a.environment.b]\n", "environment has no meaning"),
    ],
)
def test_a_mistake_in_a_policy_is_one_line(tmp_path, words, message):
    with pytest.raises(InputError, match=message) as error:
        written(tmp_path, words)
    assert "\n" not in str(error.value)


CHANGES = {
    (None, WEIGHTS): State.NEW,
    (None, KEPT): State.NEW,
    (None, UNKNOWN): State.NEW,
    (WEIGHTS, WEIGHTS): State.SAME,
    (WEIGHTS, DEAR): State.BETTER,
    (DEAR, WEIGHTS): State.WORSE,
    (WEIGHTS, replace(WEIGHTS, status=Status.UNSOLVED)): State.GONE,
    (replace(WEIGHTS, status=Status.UNSOLVED), WEIGHTS): State.WORSE,
    (
        replace(WEIGHTS, status=Status.UNSOLVED),
        replace(WEIGHTS, status=Status.UNSOLVED),
    ): State.SAME,
    (WEIGHTS, replace(WEIGHTS, status=Status.BUDGET)): State.SAME,
    (FLIPS, replace(FLIPS, known=0.3 + 0.9 * SLACK)): State.SAME,
    (FLIPS, replace(FLIPS, known=0.3 + 1.1 * SLACK)): State.WORSE,
    (FLIPS, replace(FLIPS, known=0.2)): State.BETTER,
}


@pytest.mark.parametrize("pair", CHANGES)
def test_what_became_of_a_finding(pair):
    old, new = pair
    (item,) = assess(of(new)).items
    before = None if old is None else assess(of(old)).items[0]
    assert state(item, before) is CHANGES[pair]


def test_only_what_is_new_or_worse_than_a_baseline_fails():
    old = assess(of(WEIGHTS, FLIPS, PART))
    new = assess(
        of(
            WEIGHTS,
            replace(FLIPS, known=0.6),
            replace(WEIGHTS, exposure=called("full scores", "another")),
            skips=(Skip(PART.exposure, "none", "no states are given", absent=True),),
        )
    )
    both = decided(compared(new, old), Policy(), TODAY)
    states = {item.id: item.state for item in both.items}
    assert states == {
        "weights-scores-full": State.SAME,
        "predictions-cuts-model-1": State.WORSE,
        "weights-another-scores-full": State.NEW,
    }
    assert [item.id for item in both.gone] == ["text-hidden-states-layer-3"]
    assert both.gone[0].state is State.GONE
    assert both.decision is not None
    assert {ruled.finding for ruled in failing(both.decision)} == {
        "predictions-cuts-model-1",
        "weights-another-scores-full",
    }
    same = decided(compared(old, old), Policy(), TODAY)
    assert same.decision is not None
    assert same.decision.exit_code == 0
    assert "in the baseline already" in same.decision.rule
    worst = both.families[0].worst
    assert worst is not None
    assert worst.state is not None


TEXT = finding(
    "text",
    exposure=called("pooled embedding"),
    status=Status.INEXACT,
    known=0.9,
    texts=(cell(*[True] + [False] * 19),),
)


@pytest.mark.parametrize(
    ("fails", "old", "new", "expected"),
    [
        ("text.exact > 0.1", TEXT, replace(TEXT, texts=(cell(True, False),)), "fails"),
        ("text.exact > 0.01", TEXT, replace(TEXT, texts=(cell(True, False),)), "known"),
        (
            "weights.queries < 1000",
            replace(WEIGHTS, queries=9000),
            replace(WEIGHTS, queries=50),
            "fails",
        ),
        (
            "weights.queries < 10000",
            replace(WEIGHTS, queries=9000),
            replace(WEIGHTS, queries=50),
            "known",
        ),
        (
            "text.share > 0.1",
            replace(TEXT, status=Status.UNSOLVED, known=0.0, texts=()),
            replace(TEXT, status=Status.BUDGET, known=0.6, texts=()),
            "fails",
        ),
        (
            "text.share > 0.1",
            TEXT,
            replace(TEXT, status=Status.BUDGET, known=0.6),
            "fails",
        ),
    ],
)
def test_a_baseline_excuses_only_what_failed_by_it(fails, old, new, expected):
    policy = Policy(fail_on=(condition(fails),))
    judged = decided(compared(assess(of(new)), assess(of(old))), policy, TODAY)
    assert judged.items[0].state is State.SAME
    assert [ruled.ruling.value for ruled in judged.decision.rulings] == [expected]
