"""What became of a baseline's findings, in twelve situations and more, on real audits.

The expected outcome is computed from the JSON files alone, by sets of fields; whether a
situation is about one target, and what became of the first finding, stands in its row.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest

import keyhole
import tiny_models as tiny
from keyhole.assess import Policy, assess, compared, decided
from keyhole.core import Audit, Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.report import json_form, sarif, words

GIVEN = {"recovered", "recovered within a domain", "inexact", "exposed"}
UNKNOWN = {
    "budget exhausted",
    "unverified",
    "mismatch",
    "not applicable",
    "oracle failed",
}
KEYS = "KH-TEXT-KEYS-AND-VALUES"
HIDDEN = "KH-TEXT-HIDDEN-STATES"
ROUTE = Exposure(HIDDEN, "route", name="POST /embeddings of llama.cpp")


class Audited:
    """Audits of tiny encoders in folders of their own, each made once."""

    def __init__(self, home):
        self.home = home
        self.made = {}
        (home / "texts.txt").write_text("w1 w20 w3\n")
        for name, seed in (
            ("a/model", 0),
            ("b/elsewhere", 0),
            ("c/model", 7),
            ("d/other", 7),
        ):
            tiny.model("bert", seed, num_hidden_layers=2).save_pretrained(home / name)
            tiny.tokenizer().save_pretrained(home / name)

    def __call__(self, folder, only=(KEYS, HIDDEN), **options):
        key = (folder, only, repr(options))
        if key not in self.made:
            data = self.home / "texts.txt"
            place = str(self.home / folder)
            self.made[key] = keyhole.audit(place, data=data, only=only, **options)
        return self.made[key]


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    return Audited(tmp_path_factory.mktemp("baselines"))


def changed(audit, status, **more):
    """The same audit with another end of its first finding."""
    first, *rest = audit.findings
    return replace(audit, findings=(replace(first, status=status, **more), *rest))


def served(audit, *skips, status=None):
    """An audit with an open route, or with what was found of it since."""
    route = replace(
        audit.findings[0], exposure=ROUTE, texts=(), status=status or Status.EXPOSED
    )
    return replace(
        audit, findings=audit.findings + (() if skips else (route,)), skips=skips
    )


@dataclass(frozen=True)
class Situation:
    """`same` says whether it is one target; `first` is what became of the first finding."""

    new: object
    same: bool = True
    first: str = ""
    old: object = lambda audited: audited("a/model")


SITUATIONS = {
    "again": Situation(lambda audited: audited("a/model")),
    "fewer checks": Situation(lambda audited: audited("a/model", only=(KEYS,))),
    "fewer layers": Situation(lambda audited: audited("a/model", layers=(1,))),
    "more checks": Situation(
        lambda audited: audited("a/model"),
        old=lambda audited: audited("a/model", only=(KEYS,)),
    ),
    "other folder": Situation(lambda audited: audited("b/elsewhere")),
    "renamed": Situation(lambda audited: audited("b/elsewhere", name="reviews")),
    "new weights": Situation(lambda audited: audited("c/model")),
    "new weights, by name": Situation(
        lambda audited: audited("d/other", name="reviews"),
        old=lambda audited: audited("b/elsewhere", name="reviews"),
    ),
    "another target": Situation(lambda audited: audited("d/other"), same=False),
    "better": Situation(
        lambda audited: changed(
            audited("a/model"), Status.INEXACT, known=0.6, texts=()
        ),
        first="better",
    ),
    "worse": Situation(
        lambda audited: audited("a/model"),
        first="worse",
        old=lambda audited: changed(
            audited("a/model"), Status.INEXACT, known=0.6, texts=()
        ),
    ),
    "given away again": Situation(
        lambda audited: audited("a/model"),
        first="worse",
        old=lambda audited: changed(
            audited("a/model"), Status.UNSOLVED, known=0.0, texts=()
        ),
    ),
    "the attack fails": Situation(
        lambda audited: changed(
            audited("a/model"), Status.UNSOLVED, known=0.0, texts=()
        ),
        first="gone",
    ),
    "could not check": Situation(
        lambda audited: changed(audited("a/model"), Status.BUDGET, known=0.0, texts=()),
        first="same",
    ),
    "a route that is no longer there": Situation(
        lambda audited: served(
            audited("a/model"), Skip(ROUTE, "probe", "not given: 404", absent=True)
        ),
        old=lambda audited: served(audited("a/model")),
    ),
    "a route that did not answer": Situation(
        lambda audited: served(
            audited("a/model"), Skip(ROUTE, "probe", "no answer", unchecked=True)
        ),
        old=lambda audited: served(audited("a/model")),
    ),
}


def expected(new, old, situation):
    """By the fields of two JSON files: which findings are new, same, gone, not tried."""

    def key(exposure):
        return tuple(
            str(exposure[name]) for name in ("rule", "variant", "layer", "name")
        )

    now = {key(finding["exposure"]): finding for finding in new["findings"]}
    before = {key(finding["exposure"]): finding for finding in old["findings"]}
    if not situation.same:
        return Counter(new=len(now))
    counts = Counter()
    for place, (name, finding) in enumerate(now.items()):
        if place == 0 and situation.first:
            counts[situation.first] += 1
        elif finding["status"] in GIVEN | UNKNOWN:
            counts["same" if name in before else "new"] += 1
    absent = {key(skip["exposure"]) for skip in new["skips"] if skip["absent"]}
    for name, finding in before.items():
        if finding["status"] in GIVEN and name not in now:
            counts["gone" if name in absent else "not tried"] += 1
    return counts


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_became_of_a_baseline(name, audited, tmp_path):
    situation = SITUATIONS[name]
    files = {}
    for which in ("new", "old"):
        files[which] = tmp_path / f"{which}.json"
        files[which].write_text(
            json_form.render(assess(getattr(situation, which)(audited)))
        )
    raw = {which: json.loads(file.read_text()) for which, file in files.items()}
    new, old = (assess(Audit.load(file)) for file in files.values())
    judged = decided(compared(new, old), Policy())
    found = Counter(
        item.state.value for item in (*judged.items, *judged.gone, *judged.untried)
    )
    assert found == expected(raw["new"], raw["old"], situation), words.ruling(judged)
    fails = {"new", "worse"} & set(found)
    assert judged.exit_code == (
        1 if fails else 3 if "could not" in name or "answer" in name else 0
    )
    assert (situation.same is False) is bool(judged.other)


def test_the_table_is_not_empty(audited):
    """What the situations rely on: findings of both rules, in both layers, all of them read."""
    findings = audited("a/model").findings
    assert {finding.exposure.rule for finding in findings} == {KEYS, HIDDEN}
    assert {finding.exposure.layer for finding in findings} == {1, 2}
    assert all(finding.status is Status.RECOVERED for finding in findings)
    assert audited("a/model").identity != audited("c/model").identity


def test_no_path_stands_in_an_id_or_an_identity(audited):
    audit = audited("a/model")
    home = audited.home.name
    for item in assess(audit).items:
        assert home not in item.id
        assert "model" not in item.id
    assert home not in audit.identity


SCORER = "scorer, d = 8 ({}/v2/models/scorer)"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (SCORER.format("http://host:8000"), SCORER.format("http://host:9000"), False),
        (SCORER.format("http://a.example"), SCORER.format("http://b.example"), False),
        (SCORER.format("http://host:8000"), SCORER.format("http://host:8000"), True),
        (
            "postgresql://db:5432/a, read with demo",
            "postgresql://db:5433/a, read with demo",
            False,
        ),
        ("weaviate:http://a:80/v1", "weaviate:http://a:81/v1", False),
        (
            "chroma:/one/texts, read with /x/demo",
            "chroma:/two/texts, read with demo",
            True,
        ),
        ("a/model", "/elsewhere/model/", True),
    ],
)
def test_an_address_is_part_of_what_a_target_is_and_a_folder_is_not(one, other, same):
    audits = [
        Audit(target, f"identity of {target} {n}", ())
        for n, target in enumerate((one, other))
    ]
    assert audits[0].is_of(audits[1]) is same


def test_words_and_alerts_of_what_was_not_tried(audited):
    """GitHub closes an alert that the next file does not have: one not looked for stays open."""
    new = audited("a/model", only=(KEYS,))
    old = audited("a/model")
    judged = decided(compared(assess(new), assess(old)), Policy())
    untried = len(old.findings) - len(new.findings)
    assert untried > 0
    assert f"{untried} not tried, as before" in words.ruling(judged)
    assert "gone" not in words.ruling(judged)
    results = json.loads(sarif.render_alerts(judged))["runs"][0]["results"]
    assert [result["baselineState"] for result in results] == ["unchanged"] * len(
        old.findings
    )
    document = json_form.document(judged)["assessment"]
    assert (len(document["untried"]), document["gone"]) == (untried, [])
