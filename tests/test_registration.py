"""Adding an attack is one file and one line: a dummy of each family shows up everywhere.

The files are tests/dummies/*.py, the lines are in DUMMIES. Each dummy must appear in
the help of its command, run through the command's function, have its row in the audit,
and stand in docs/methods.md. The way of one parameter, from the command's function to
the attack, is counted.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry

sys.path.insert(0, str(Path(__file__).parent / "dummies"))
import call_stack
from coin_toss import CoinToss
from doubled_loss import DoubledLoss
from first_words import FirstWords
from last_word import LastWord
from standing_still import StandingStill

from keyhole.disrupt import registry as disrupting
from keyhole.extract import registry as extracting
from keyhole.harden import defences as hardening
from keyhole.invert import registry as inverting
from keyhole.models import demo
from keyhole.recover import registry as recovering

HEAD = keyhole.oracle.plant("head", dim=3, seed=1)
LAYER = keyhole.oracle.plant("attention", dim=3, every_token=True, seed=1)
TEXT = "a warm and funny film ."
TEXT_EXPOSURE = Exposure("KH-TEXT-OTHER")
STEPS = 5  # modules that a parameter may pass


def extract(folder: Path) -> None:
    keyhole.extract.run(HEAD, "dummy", seed=3)


def invert(folder: Path) -> None:
    problem, _ = keyhole.invert.plant(2, 3)
    keyhole.invert.run(problem, "dummy", starts=1, seed=3)


def recover(folder: Path) -> None:
    leak = keyhole.recover.leak_of(*shipped(), TEXT, "hidden:1")
    keyhole.recover.run("demo", leak, method="dummy")


def disrupt(folder: Path) -> None:
    keyhole.disrupt.run("demo", method="dummy", examples=1, share=0.02)


def harden(folder: Path) -> None:
    data = folder / "train.tsv"
    data.write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    keyhole.harden.run("demo", data, folder / "out", method="dummy", epochs=1)


def shipped():
    loaded = demo.load_demo()
    return loaded.model, loaded.tokenizer


def endpoint(only):
    return keyhole.audit({"head": HEAD, "layer": LAYER}, only=[only])


def model(only):
    subject = keyhole.audit.TextTarget(
        demo.load_demo("classification"),
        [TEXT],
        layers=[1],
        precisions=["float32"],
        examples=demo.EXAMPLES[:1],
    )
    return keyhole.audit(subject, only=[only])


@dataclass(frozen=True)
class Dummy:
    """One line of registration, and where the dummy has to appear."""

    registry: Registry
    entry: Entry
    command: str
    run: Callable[[Path], None]
    audit: Callable[[], keyhole.core.Audit] | None


DUMMIES = {
    "extract": Dummy(
        extracting.METHODS,
        Entry(
            "dummy",
            CoinToss,
            (extracting.Row(Exposure("KH-WEIGHTS-OTHER"), extracting.Kind.HEAD, "-"),),
        ),
        "extract",
        extract,
        partial(endpoint, "KH-WEIGHTS-OTHER"),
    ),
    "invert": Dummy(
        inverting.METHODS,
        Entry(
            "dummy", StandingStill, (inverting.Row(Exposure("KH-INPUTS-OTHER"), "-"),)
        ),
        "invert",
        invert,
        partial(endpoint, "KH-INPUTS-OTHER"),
    ),
    "recover": Dummy(
        recovering.ATTACKS,
        Entry(
            "dummy",
            FirstWords,
            (
                recovering.Row(
                    "hidden", False, TEXT_EXPOSURE, "-", lambda _: [1], ("float32",)
                ),
            ),
        ),
        "recover",
        recover,
        partial(model, "KH-TEXT-OTHER"),
    ),
    "disrupt": Dummy(
        disrupting.ATTACKERS,
        Entry("dummy", LastWord, (disrupting.Row(Exposure("KH-PREDICTIONS-OTHER")),)),
        "disrupt",
        disrupt,
        partial(model, "KH-PREDICTIONS-OTHER"),
    ),
    "harden": Dummy(
        hardening.DEFENCES, Entry("dummy", DoubledLoss), "harden", harden, None
    ),
}


@contextmanager
def registered(dummy: Dummy):
    dummy.registry.add(dummy.entry)
    try:
        yield
    finally:
        del dummy.registry[dummy.entry.name]


@pytest.fixture(params=DUMMIES.values(), ids=DUMMIES)
def dummy(request):
    with registered(request.param):
        yield request.param


def test_it_is_a_choice_of_the_command(dummy, keyhole):
    done = keyhole("lab methods dummy")
    assert f"{dummy.command} --method dummy" in done.stdout


def test_a_parameter_passes_few_modules_on_its_way_to_the_attack(dummy, tmp_path):
    call_stack.SEEN.clear()
    with torch.random.fork_rng():
        dummy.run(tmp_path)
    # From the command's function on; the module of the attack itself makes one more.
    assert 0 < len(call_stack.SEEN) < STEPS, call_stack.SEEN


@pytest.mark.parametrize(
    "family", [name for name, dummy in DUMMIES.items() if dummy.audit]
)
def test_an_attack_has_a_row_in_the_audit(family):
    with registered(DUMMIES[family]):
        audit = DUMMIES[family].audit()
        attack = type(DUMMIES[family].registry.make("dummy")).__name__
    assert attack in {finding.attack for finding in audit.findings}


def test_it_stands_in_the_documents(dummy, root):
    generate = runpy.run_path(str(root / "docs" / "generate.py"))
    row = next(
        line
        for line in generate["methods_reference"]().splitlines()
        if "`dummy`" in line
    )
    assert dummy.entry.about in row


def test_an_option_that_it_does_not_have_is_refused(dummy):
    with pytest.raises(
        keyhole.core.errors.InputError, match="dummy has no option colour"
    ):
        dummy.registry.make("dummy", colour="blue")
