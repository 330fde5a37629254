"""The ledger: answers are stored before they are used, and no question is asked twice."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import warm_process
from any_function import Failing
from keyhole import extract, oracle
from keyhole.core.errors import InputError
from warm_process import Warm

DIM = 4
TARGET = oracle.plant(dim=DIM, seed=5)


def draw(count: int, n: int = 2, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, n, DIM, dtype=torch.float64, generator=stream)


def test_answers_are_remembered_across_openings(tmp_path):
    counted = oracle.Counted(TARGET)
    with oracle.Ledger(counted, tmp_path / "run.db") as ledger:
        first = ledger(draw(100))
        assert torch.equal(ledger(draw(100)), first)
        assert (ledger.asked, ledger.remembered, len(ledger)) == (100, 100, 100)
    with oracle.Ledger(counted, tmp_path / "run.db") as ledger:
        assert torch.equal(ledger(draw(120)), TARGET(draw(120)))
    assert counted.queries == 120


def test_a_question_repeated_in_one_batch_is_asked_once(tmp_path):
    counted = oracle.Counted(TARGET)
    ledger = oracle.Ledger(counted, tmp_path / "run.db")
    answers = ledger(draw(3)[[0, 1, 0, 2, 1]])
    assert counted.queries == 3
    assert torch.equal(answers, TARGET(draw(3))[[0, 1, 0, 2, 1]])
    ledger.close()


def test_a_single_bit_makes_another_question(tmp_path):
    counted = oracle.Counted(TARGET)
    with oracle.Ledger(counted, tmp_path / "run.db") as ledger:
        question = draw(1)
        ledger(question)
        ledger(torch.nextafter(question, question + 1))
        ledger(
            question.reshape(2, 1, DIM)
        )  # the same bytes as two sequences of one token
    assert counted.queries == 4


@pytest.mark.parametrize("every", [False, True])
def test_vector_answers(tmp_path, every):
    target = oracle.plant("attention", dim=DIM, every_token=every, outputs=3)
    with oracle.Ledger(target, tmp_path / "run.db") as ledger:
        for _ in range(2):
            assert torch.equal(ledger(draw(5)), target(draw(5)))


def test_answers_paid_for_before_the_budget_ended_are_kept(tmp_path):
    with (
        oracle.Ledger(oracle.Counted(TARGET, budget=7), tmp_path / "run.db") as ledger,
        pytest.raises(oracle.BudgetExhausted) as caught,
    ):
        ledger(draw(10))
    assert torch.equal(caught.value.answers, TARGET(draw(10)[:7]))
    counted = oracle.Counted(TARGET)
    with oracle.Ledger(counted, tmp_path / "run.db") as ledger:
        assert torch.equal(ledger(draw(10)), TARGET(draw(10)))
    assert counted.queries == 3


def test_good_answers_are_kept_and_nan_is_not(tmp_path):
    class Flaky:
        dim = DIM
        identity = TARGET.identity
        broken = True

        def __call__(self, sequences):
            answers = TARGET(sequences)
            if self.broken:
                answers[4] = torch.nan
            return answers

    flaky = Flaky()
    counted = oracle.Counted(flaky)
    with oracle.Ledger(counted, tmp_path / "run.db") as ledger:
        with pytest.raises(
            oracle.OracleError, match="NaN or infinity in 1 of 10 answers"
        ):
            ledger(draw(10))
        assert len(ledger) == 9
        flaky.broken = False
        assert torch.equal(ledger(draw(10)), TARGET(draw(10)))
    assert counted.queries == 11


def test_answers_before_an_outage_are_kept(tmp_path):
    path = tmp_path / "run.db"
    with oracle.Ledger(Failing(TARGET, after=64), path) as ledger:
        with pytest.raises(oracle.OracleError, match="down"):
            ledger(draw(100))
        assert len(ledger) == 64


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            oracle.plant(dim=DIM, seed=6),
            "this run has target head:.*, that of .* has target head:",
        ),
        (
            oracle.plant(dim=DIM + 1, seed=5),
            "this run has dim 5, that of .* has dim 4: choose another file",
        ),
        (
            oracle.Rounded(TARGET, 3),
            r"this run has target .*\|rounded:3, that of .* has target head:",
        ),
    ],
)
def test_a_ledger_of_another_target_is_refused(tmp_path, other, message):
    oracle.Ledger(TARGET, tmp_path / "run.db").close()
    with pytest.raises(InputError, match=message) as caught:
        oracle.Ledger(other, tmp_path / "run.db")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["version", "dtype"])
def test_a_ledger_of_another_version_or_dtype_is_refused(tmp_path, name):
    oracle.Ledger(TARGET, tmp_path / "run.db").close()
    db = sqlite3.connect(tmp_path / "run.db")
    db.execute("UPDATE meta SET value = 'other' WHERE name = ?", [name])
    db.commit()
    db.close()
    with pytest.raises(
        InputError, match=f"this run has {name} .*, that of .* has {name} other"
    ):
        oracle.Ledger(TARGET, tmp_path / "run.db")


def test_other_files_are_refused_as_ledgers(tmp_path):
    (tmp_path / "text.db").write_text(
        "no database at all, but long enough to have a header" * 9
    )
    with pytest.raises(InputError, match=r"cannot read .*text\.db as a Keyhole ledger"):
        oracle.Ledger(TARGET, tmp_path / "text.db")
    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE notes (body TEXT)")
    db.commit()
    db.close()
    with pytest.raises(
        InputError, match="not a Keyhole ledger but another SQLite file"
    ):
        oracle.Ledger(TARGET, tmp_path / "other.db")
    with pytest.raises(InputError, match="cannot write the ledger"):
        oracle.Ledger(TARGET, tmp_path / "no" / "run.db")
    with pytest.raises(InputError, match="as a Keyhole ledger: it is a folder"):
        oracle.Ledger(TARGET, tmp_path)


# A process attacks a target that logs every question before it answers.
ATTACKER = """
import hashlib, os, signal, sys, time
import torch
from keyhole import extract, oracle

ledger, log, die_at, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
target = oracle.plant(dim=12, seed=5)

class Logged:
    dim, identity, calls = target.dim, target.identity, 0
    def __call__(self, sequences):
        self.calls += 1
        if self.calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            for question in sequences:
                file.write(hashlib.sha256(question.numpy().tobytes()).hexdigest() + "\\n")
        time.sleep(pause)
        return target(sequences)

with oracle.Ledger(Logged(), ledger) as memory:
    result = extract.SingleHead()(memory)
print(result.status.value, result.queries, result.remembered)
"""
QUESTIONS = (
    12 * 12 + 12 + 96
)  # of the attack and the judge; repeated questions count once


def attacker(
    tmp_path: Path, die_at: int = 0, pause: float = 0.0
) -> AbstractContextManager[Warm]:
    arguments = (
        str(tmp_path / "run.db"),
        str(tmp_path / "log"),
        str(die_at),
        str(pause),
    )
    return warm_process.started(warm_process.code, ATTACKER, *arguments, cwd=tmp_path)


def finish(process: Warm) -> list[str]:
    """Return the status, the queries, and how many of these were remembered."""
    done = process.finish()
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


@pytest.mark.release
@pytest.mark.slow
def test_killed_in_the_middle_and_resumed_asks_nothing_twice(tmp_path):
    for die_at in (2, 3):  # two attackers, each killed at its n-th call to the oracle
        with attacker(tmp_path, die_at) as killed:
            assert killed.finish().returncode == -signal.SIGKILL
    assert 0 < len(asked(tmp_path)) < QUESTIONS
    with attacker(tmp_path) as last:
        status, queries, remembered = finish(last)
    assert (status, int(queries)) == ("recovered", 156)
    assert int(remembered) > 0
    assert len(asked(tmp_path)) == len(set(asked(tmp_path))) == QUESTIONS


@pytest.mark.release
@pytest.mark.slow
def test_an_attack_killed_at_any_moment_resumes(tmp_path):
    with attacker(tmp_path, pause=0.05) as killed:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "log").exists():
            time.sleep(0.02)
        time.sleep(0.12)
        killed.send_signal(signal.SIGKILL)
        assert killed.finish().returncode == -signal.SIGKILL
    before = len(asked(tmp_path))
    stored = sqlite3.connect(tmp_path / "run.db")
    durable = stored.execute("SELECT count(*) FROM answers").fetchone()[0]
    stored.close()
    with attacker(tmp_path) as last:
        assert finish(last)[0] == "recovered"
    # Only a batch whose answers had not arrived may be asked again.
    assert len(asked(tmp_path)) - QUESTIONS == before - durable


@pytest.mark.release
def test_two_processes_share_a_file_and_ask_nothing_twice(tmp_path):
    with (
        attacker(tmp_path, pause=0.02) as first,
        attacker(tmp_path, pause=0.02) as other,
    ):
        results = [finish(first), finish(other)]
    assert [result[0] for result in results] == ["recovered", "recovered"]
    assert len(asked(tmp_path)) == len(set(asked(tmp_path))) == QUESTIONS


def test_an_extraction_counts_remembered_answers(tmp_path):
    with oracle.Ledger(TARGET, tmp_path / "run.db") as ledger:
        first = extract.SingleHead()(ledger)
        again = extract.SingleHead()(ledger)
    assert (first.queries, first.remembered) == (20, 0)
    assert (again.queries, again.remembered) == (20, 20)
    assert json.dumps(again.to_dict())
