"""Many targets: the same findings as one by one, nothing lost and nothing done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from dataclasses import replace

import pytest

import tiny_models as tiny
from command_line import KEYHOLE, started
from dask_workers import BEGUN, ENDED, kill_in_the_middle, workers
from keyhole import audit, oracle, report
from keyhole.audit import Audit, NamedTarget
from keyhole.audit.fleets import fleet
from keyhole.audit.run import Checking
from keyhole.core import Fleet
from keyhole.core.errors import InputError
from keyhole.core.journal import records_in
from kill_points import lasting, wait_until

FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
HOSTILE = "<script>alert(1)</script> ../../x [red]"
FLEET = f"""
[defaults]
texts = 1
[[target]]
name = "encoder"
target = "./encoder"
layers = [1]
data = "texts.txt"
[[target]]
name = "{HOSTILE}"
target = "head.safetensors"
[[target]]
target = "./missing"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    tiny.model("bert", num_hidden_layers=1).save_pretrained(folder / "encoder")
    tiny.tokenizer().save_pretrained(folder / "encoder")
    oracle.save(oracle.plant(dim=3, seed=1), folder / "head.safetensors")
    (folder / "texts.txt").write_text("w3 w14 w15 w92 w65\n")
    (folder / "fleet.toml").write_text(FLEET)
    return folder


def facts(audit):
    return lasting(json.loads(json.dumps(audit.to_dict())))


@pytest.fixture(scope="module")
def whole(place):
    """What an undisturbed run in this process gives."""
    return fleet(place / "fleet.toml")


class Stop(BaseException):
    """The end of a run, at a point of the test's choice."""


def counted(monkeypatch, stops=()):
    """What is opened, and which checks are made, from now on; it stops after so many checks."""
    opened = []
    made = []
    usual = NamedTarget.open
    take = Checking.take

    def noted(named):
        opened.append(named.name)
        return usual(named)

    def taken(checking, done):
        take(checking, done)
        made.append((opened[-1], done.task.key))
        if len(made) in stops:
            raise Stop

    monkeypatch.setattr(NamedTarget, "open", noted)
    monkeypatch.setattr(Checking, "take", taken)
    return opened, made


def test_every_target_is_audited_as_it_would_be_alone(place, whole, monkeypatch):
    monkeypatch.chdir(place)
    assert list(whole.audits) == ["encoder", HOSTILE, "missing"]
    encoder = audit("./encoder", data="texts.txt", texts=1, layers=[1])
    assert facts(whole.audits["encoder"]) == facts(replace(encoder, name="encoder"))
    alone = replace(audit("head.safetensors"), name=HOSTILE)
    assert facts(whole.audits[HOSTILE]) == facts(alone)
    missing = whole.audits["missing"]
    assert (missing.exit_code, whole.exit_code) == (3, 1)
    assert "there is no ./missing: give a .safetensors file" in missing.skips[0].reason
    assert "3 targets: 2 give something away, 1 could not be checked" in whole.summary()
    assert Fleet.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_stopped_anywhere_it_goes_on_and_opens_nothing_that_is_finished(
    place, whole, tmp_path, monkeypatch
):
    checks = sum(len(each.findings + each.skips) for each in whole.audits.values())
    opened, made = counted(monkeypatch, (3, checks - 4))
    path = tmp_path / "journal"
    resumed = []
    for _ in range(2):
        with pytest.raises(Stop):
            fleet(place / "fleet.toml", journal=path)
    again = fleet(place / "fleet.toml", journal=path, notice=resumed.append)
    assert len(made) == len(set(made)) <= checks
    assert resumed == ["resuming: 1 of 3 targets are done"]
    assert {name: facts(each) for name, each in again.audits.items()} == {
        name: facts(each) for name, each in whole.audits.items()
    }
    opened.clear()
    made.clear()
    last = fleet(place / "fleet.toml", journal=path)
    assert not made
    assert opened == ["./missing"]  # all others are known without being opened
    assert facts(last.audits["encoder"]) == facts(whole.audits["encoder"])
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]


def test_touched_files_are_checked_anew_and_others_are_not(tmp_path, monkeypatch):
    def identities():
        found = fleet(tmp_path / "fleet.toml", journal=tmp_path / "journal")
        return [found.audits[f"{name}.safetensors"].identity for name in "ab"]

    for seed, name in enumerate("ab", 1):
        oracle.save(oracle.plant(dim=2, seed=seed), tmp_path / f"{name}.safetensors")
    (tmp_path / "fleet.toml").write_text('[[target]]\ntarget = "*.safetensors"')
    before = identities()
    oracle.save(oracle.plant(dim=2, seed=3), tmp_path / "b.safetensors")
    opened, _ = counted(monkeypatch)
    after = identities()
    assert opened == ["b.safetensors"]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_another_runs_journal_is_refused(place, tmp_path):
    path = tmp_path / "journal"
    path.write_text('{"run": "audit"}\n')
    with pytest.raises(InputError, match=r"run fleet, that of .* has run audit"):
        fleet(place / "fleet.toml", journal=path)


def test_the_page_has_a_row_for_each_and_nothing_of_theirs_is_markup(whole):
    page = report.render_fleet(whole, {"encoder": "encoder.html", HOSTILE: "x y.html"})
    assert "<script>alert" not in page
    assert "Content-Security-Policy" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert '<a href="encoder.html">encoder</a>' in page
    assert 'href="x%20y.html"' in page
    assert page.count("<tr>") == 1 + 3
    assert "Could not check: there is no ./missing" in page
    assert "http://" not in page.split("<body>")[0]
    assert "Of 3 targets 2 give something away, 1 could not be checked." in page


@pytest.mark.slow
def test_the_command_writes_a_folder_and_the_table(place, whole, tmp_path, keyhole):
    view = f"audit --targets {place}/fleet.toml --out out"
    done = keyhole(view)
    assert done.returncode == 1, done.stderr
    assert "Of 3 targets 2 give something away" in done.stdout
    assert HOSTILE in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    stems = ("encoder", "script-alert-1-script-x-red", "missing")
    files = {f"{stem}.{end}" for stem in stems for end in ("json", "html")}
    assert names == {*files, "index.html", "fleet.journal"}  # one had no result
    found = Audit.load(tmp_path / "out" / "encoder.json")
    assert facts(found) == facts(whole.audits["encoder"])
    again = keyhole(view)
    assert "resuming:" in again.stderr
    (tmp_path / "out" / "fleet.journal").unlink()
    refused = keyhole(view)
    assert refused.returncode == 2
    assert "out/index.html exists: give --force to replace it" in refused.stderr
    for words, line in {
        "demo --targets x": "TARGET is for one target",
        "demo --out x": "--out is for --targets",
        "": "name a TARGET, a file of them with --targets, or a policy with targets",
        "--targets missing.toml": "missing.toml",
        f"--targets {place}/fleet.toml --out {place}/fleet.toml": "--out",
    }.items():
        done = keyhole("audit", words)
        assert done.returncode == 2
        assert line in done.stderr
        assert "Traceback" not in done.stderr


@FULL  # without processes: tests/test_killed.py
@pytest.mark.slow
def test_killed_with_its_processes_the_same_command_goes_on(place, whole, tmp_path):
    journal = tmp_path / "out" / "fleet.journal"
    view = f"audit --targets {place}/fleet.toml --out out --processes 2"
    words = [*KEYHOLE, *view.split()]
    with started(words, cwd=tmp_path) as process:
        assert wait_until(lambda: records_in(journal) >= 1, process)
        process.kill()
        process.wait()
    kept = records_in(journal)
    with started(words, cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 1, errors
    assert int(re.search(r"resuming: (\d+) of", errors)[1]) == kept
    for name, stem in (
        ("encoder", "encoder"),
        (HOSTILE, "script-alert-1-script-x-red"),
    ):
        found = Audit.load(tmp_path / "out" / f"{stem}.json")
        assert facts(found) == facts(whole.audits[name])


@FULL  # else only as benchmarks/fleet.py does it
@pytest.mark.slow
def test_a_worker_of_a_cluster_is_killed_and_nothing_is_lost_or_done_twice(
    place, tmp_path
):
    """A real scheduler and two real workers, of which one is killed with a check under way."""
    pytest.importorskip("distributed")
    for name in "ab":
        shutil.copytree(place / "encoder", tmp_path / name)
    shutil.copy(place / "texts.txt", tmp_path)
    (tmp_path / "fleet.toml").write_text(
        '[defaults]\ntexts = 1\ndata = "texts.txt"\nlayers = [1]\n[[target]]\ntarget = "./[ab]"\n'
    )
    whole = fleet(tmp_path / "fleet.toml")
    lost = set()
    with workers(tmp_path) as cluster:
        first, _ = cluster.add(2)

        def kill():
            lost.update(kill_in_the_middle(cluster, first, after=2))

        killer = threading.Thread(target=kill)
        killer.start()
        found = fleet(
            tmp_path / "fleet.toml", dask=cluster.address, journal=tmp_path / "journal"
        )
        killer.join()
        begun = cluster.recorded(BEGUN)
        ended = cluster.recorded(ENDED)
    for name in "ab":
        assert facts(found.audits[name]) == facts(whole.audits[name])
    assert lost
    assert set(begun) == set(ended)
    assert {
        check for check, times in begun.items() if times > 1
    } <= lost  # nothing else ran again


def test_numbers_of_workers_follow_the_gpus_that_they_see():
    from keyhole.core.tasks import Cluster

    seen = {"tcp://a:1": "", "tcp://a:2": "", "tcp://b:1": "0,1", "tcp://b:2": "1,0"}

    class Client:
        def nthreads(self):
            return dict.fromkeys(seen, 1)

        def run(self, function, workers, on_error):
            return {name: seen[name] for name in workers}

    cluster = Cluster("tcp://a:0", Client())
    numbers = cluster.workers({})
    # Two that see the same GPUs take one each; those with an order of their own take
    # their first.
    assert numbers == {"tcp://a:1": 0, "tcp://a:2": 1, "tcp://b:1": 0, "tcp://b:2": 0}
    seen = {"tcp://a:2": "", "tcp://a:3": ""}
    assert cluster.workers(numbers) == {"tcp://a:2": 1, "tcp://a:3": 0}
