"""An audit that was stopped goes on: nothing is checked twice, and the findings are the same."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace

import pytest
import torch

import tiny_classifiers
import tiny_models as tiny
from keyhole import oracle
from keyhole.audit import Audit, TextTarget, audit
from keyhole.audit.check import Check, Checked
from keyhole.audit.run import Checking
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.journal import Journal
from keyhole.core.tasks import Runner
from keyhole.models import identity

HEAD = oracle.plant(dim=4, seed=1)
LAYER = oracle.plant("attention", dim=3, every_token=True, seed=1)
# A search for each kind of exposure is not what this is about.
ONLY = ("KH-TEXT-HIDDEN-STATES", "KH-TEXT-KEYS-AND-VALUES", "predictions")


def classifier(seed=2, **options):
    model = tiny_classifiers.model(seed=seed, labels=2).eval().requires_grad_(False)
    loaded = tiny.loaded(model)
    examples = tiny_classifiers.examples(2)
    given = {"texts": [examples[0].text], "examples": examples, "layers": [1]}
    return TextTarget(loaded, **{**given, "precisions": ("float32",), **options})


def timeless(data):
    """What must be the same in every run."""
    if isinstance(data, dict):
        return {
            name: timeless(value)
            for name, value in data.items()
            if name not in UNTIMELY
        }
    return [timeless(part) for part in data] if isinstance(data, list | tuple) else data


UNTIMELY = ("seconds", "created")


class Stop(Exception):
    """The end of a run, at a point of the test's choice."""


def stop_after(count):
    """A `track` that ends an audit once so many checks are done."""

    def track(name, total=None):
        def progress(done, total=None, note=""):
            if name == "audit" and done == count:
                raise Stop

        return progress

    return track


def followed(rows):
    """A `track` that writes down where the audit stands."""

    def track(name, total=None):
        def progress(done, whole=None, note=""):
            if name == "audit":
                rows.append((done, whole, note))

        return progress

    return track


@pytest.mark.parametrize(
    ("target", "only"),
    [({"head": HEAD, "layer": LAYER}, ("weights",)), (classifier(), ONLY)],
    ids=type,
)
def test_wherever_it_stops_it_ends_with_the_same_findings(target, only, tmp_path):
    whole = audit(target, only=only, track=followed(rows := []))
    rows = rows
    total = rows[0][1]
    assert [row[0] for row in rows] == list(range(total + 1))
    assert (
        len({row[2] for row in rows[1:]}) == total
    )  # every check has a name of its own
    path = tmp_path / "journal"
    stops = sorted({1, total - 1})
    for stop in stops:
        with pytest.raises(Stop):
            audit(target, only=only, journal=path, track=stop_after(stop))
        assert path.read_text().count("\n") == 1 + stop
        assert path.stat().st_mode & 0o077 == 0
    reported = []
    rest = []
    found = audit(
        target,
        only=only,
        journal=path,
        track=followed(rest),
        notice=reported.append,
    )
    assert reported == [f"resuming: {total - 1} of {total} checks are done"]
    assert rest == [(total - 1, total, ""), rows[-1]]  # only what was left is made
    assert timeless(found.to_dict()) == timeless(whole.to_dict())
    assert found.seconds >= sum(finding.seconds for finding in found.findings)
    assert Audit.from_dict(json.loads(json.dumps(found.to_dict()))) == found


CHANGES = {
    "another model": (
        lambda: classifier(seed=3),
        {},
        r"target \w+, that of .* has target \w+",
    ),
    "another text": (
        lambda: classifier(texts=["w3 w4"]),
        {},
        "model data .*, that of .* has model data",
    ),
    "more texts": (
        lambda: classifier(texts=["w3 w4", "w5"]),
        {},
        "model texts 2, that of .* has model texts 1",
    ),
    "fewer flips": (
        lambda: classifier(examples=tiny_classifiers.examples(1)),
        {},
        "model examples 1, that of .* has model examples 2",
    ),
    "another layer": (lambda: classifier(layers=[2]), {}, r"model layers \[2\], that"),
    "another precision": (
        lambda: classifier(precisions=("bfloat16",)),
        {},
        r"model precisions \['bfloat16'\], that",
    ),
    "another seed": (classifier, {"seed": 1}, "seed 1, that of .* has seed 0"),
    "an endpoint": (lambda: HEAD, {}, r"target head:.*, that of .* has target \w+"),
}


@pytest.mark.parametrize(("target", "options", "words"), CHANGES.values(), ids=CHANGES)
def test_another_audits_journal_is_refused_with_what_differs(
    target, options, words, tmp_path
):
    path = tmp_path / "journal"
    with pytest.raises(Stop):
        audit(classifier(), journal=path, track=stop_after(1))
    before = path.read_bytes()
    fix = "give --force to begin anew, or remove this file"
    with pytest.raises(InputError, match=rf"this run has {words}.*: {fix}$"):
        audit(target(), journal=path, **options)
    assert path.read_bytes() == before
    with pytest.raises(Stop):
        audit(target(), journal=path, force=True, track=stop_after(2), **options)
    assert path.read_text().count("\n") == 1 + 2


def test_the_same_head_on_other_weights_is_another_model(tmp_path):
    """The head does not change hidden states, but it does change predictions."""
    path = tmp_path / "journal"
    target = classifier()
    with pytest.raises(Stop):
        audit(target, journal=path, track=stop_after(1))
    with torch.no_grad():
        target.loaded.model.classifier.weight += 1
    assert identity(target.loaded.model) == target.loaded.identity
    with pytest.raises(InputError, match=r"target \w+, that of .* has target \w+"):
        audit(target, journal=path)


class Moody:
    """A head that answers a given number of calls, and none after that."""

    dim = HEAD.dim
    identity = "moody"

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, sequences):
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("gone")
        return HEAD(sequences)


def test_what_the_target_did_not_answer_is_tried_again(tmp_path):
    path = tmp_path / "journal"
    gone = audit(Moody(40), journal=path)
    failed = [each for each in gone.findings if each.status is Status.ORACLE_FAILED]
    assert 0 < len(failed) < len(gone.findings)
    back = audit(Moody(10**9), journal=path)
    assert timeless(asdict(back)["findings"]) == timeless(
        asdict(audit(Moody(10**9)))["findings"]
    )


def test_a_target_that_never_answers_is_said_once_and_leaves_no_journal(tmp_path):
    path = tmp_path / "journal"
    found = audit({"a": Moody(0), "b": Moody(0)}, journal=path)
    assert [(each.part, each.status) for each in found.findings] == [
        ("a", Status.ORACLE_FAILED),
        ("b", Status.ORACLE_FAILED),
    ]
    # What needs no answer is done: the attacks that need a layer's weights.
    assert all("KH-INPUTS" in line for line in path.read_text().splitlines()[1:])


def test_an_audit_that_could_not_begin_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="from 0 to 2"):
        audit(classifier(layers=[7]), journal=tmp_path / "journal")
    assert not (tmp_path / "journal").exists()


def test_a_journal_that_somebody_changed_is_one_line(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(Stop):
        audit(HEAD, journal=path, track=stop_after(1))
    head, first = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps({'key': json.loads(first)['key']})}\n")
    with pytest.raises(
        InputError,
        match=r"does not hold what a run wrote under 1\. weights-.*remove this line",
    ):
        audit(HEAD, journal=path)


def test_a_ledger_is_for_endpoints(tmp_path):
    with pytest.raises(
        InputError, match=r"^--ledger keeps .*, and tiny is a model: leave"
    ):
        audit(classifier(), ledger=tmp_path / "run.db")
    assert not (tmp_path / "run.db").exists()
    assert audit(HEAD, ledger=tmp_path / "run.db").exposed
    assert (tmp_path / "run.db").exists()


def test_ctrl_c_in_an_inversion_stops_the_audit(tmp_path):
    """A solver hands over its best input when it is interrupted; an audit stops."""

    def track(name, total=None):
        def progress(done, total=None, note=""):
            if "output" in name:
                signal.raise_signal(signal.SIGINT)

        return progress

    path = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        audit(LAYER, journal=path, track=track)
    assert path.read_text().count("\n") > 1


def test_ctrl_c_is_not_heard_by_an_audit_that_was_told_to_ignore_it(tmp_path):
    """As `nohup` does, and a shell that starts a command in the background."""

    def track(name, total=None):
        return lambda done, total=None, note="": signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert audit(LAYER, journal=tmp_path / "journal", track=track).exposed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_equal_targets_share_a_journal(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(Stop):
        audit(classifier(), journal=path, track=stop_after(2))
    same_model = classifier()
    named = replace(
        same_model, loaded=replace(same_model.loaded, name="in another folder")
    )
    reported = []
    with pytest.raises(Stop):
        audit(
            named,
            journal=path,
            track=stop_after(3),
            notice=reported.append,
        )
    assert reported[0].startswith("resuming: 2 of ")


WEIGHTS = {"a": 1.0, "b": 50.0}


def test_the_time_left_is_told_by_the_weight_of_what_is_left():
    """A check costs its weight, times the seconds that a weight of 1 took so far."""
    reported = []

    class Recorder:
        def __call__(self, done, total=None, note=""):
            reported.append((done, total))

        def expect(self, left):
            reported.append(left)

    exposure = Exposure("KH-WEIGHTS-SIGNS")
    checks = {
        name: Check(exposure, lambda _: Checked(()), weight=w)
        for name, w in WEIGHTS.items()
    }
    with Journal(None, {}) as journal, Runner(0) as runner:
        run = Checking(checks, runner, journal, lambda name, total=None: Recorder())
        run.begin(lambda key: lambda worker: Checked((), seconds=2.0))
        for done in runner.run():
            run.take(done)
    assert reported == [50 * 2.0, (1, 2), 0.0, (2, 2)]
