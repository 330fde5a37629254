"""`keyhole extract` and `keyhole audit` of an endpoint: options and secrets."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from endpoint_server import Endpoint, output, scores, self_signed, serving, vectors

import warm_process
from command_line import KEYHOLE, inside, started
from keyhole import oracle
from kill_points import keyhole

DIM = 4
TARGET = oracle.plant(dim=DIM, seed=3)
TOKEN = "tok-3n-f0r-t3sts-0nly"
PASSWORD = "passw0rd-f0r-t3sts"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def command(*words):
        return inside(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)

    return command


@pytest.mark.slow  # a process
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_token_is_sent_and_stands_nowhere_else(tmp_path, run, monkeypatch):
    """It is not in the list of processes, in the output, or in any file."""
    endpoint = Endpoint([vectors(DIM)], scores(TARGET))
    endpoint.token = f"Bearer {TOKEN}"
    (tmp_path / "tls").mkdir()
    certificate = self_signed(tmp_path / "tls")
    monkeypatch.setenv("MY_TOKEN", f"Bearer {TOKEN}")
    seen: list[str] = []
    reach = ("--header", "Authorization=MY_TOKEN", "--ca", "tls/certificate.pem")
    with serving(endpoint, certificate):
        command = [
            *KEYHOLE,
            "--debug",
            "extract",
            endpoint.address,
            *reach,
            "--ledger",
            "run.db",
            "--out",
            "stolen.json",
            "--json",
        ]
        with started(command, cwd=tmp_path) as process:
            seen.append(" ".join(psutil.Process(process.pid).cmdline()))
            out, words = process.communicate(timeout=120)
            seen += [out, words]
            assert process.returncode == 1, words
        done = run("audit", endpoint.address, *reach, "--ledger", "audit.db")
        assert done.returncode == 1, done.stderr
        seen += [done.stdout, done.stderr]
        monkeypatch.setenv(
            "MY_TOKEN", f"Bearer wrong-{TOKEN}"
        )  # which the server repeats
        for name, code in (("extract", 3), ("audit", 3)):
            done = run(
                "--debug",
                name,
                endpoint.address,
                *reach,
                "--ledger",
                "run.db",
                "--force",
            )
            assert done.returncode == code, done.stderr
            assert "status 401: " in done.stderr
            assert "(secret)" in done.stderr
            seen += [done.stdout, done.stderr]
    assert all(
        headers["Authorization"] == endpoint.token for headers in endpoint.headers
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files if path.name.startswith("keyhole-")}
    assert {"run.db", "stolen.json"} <= {path.name for path in files}
    assert {".json", ".html"} <= kinds
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert not [words for words in seen if TOKEN in words]


def test_a_password_of_an_address_is_written_nowhere(tmp_path, run):
    endpoint = Endpoint([vectors(DIM)], scores(TARGET))
    with serving(endpoint):
        address = endpoint.address.replace("//", f"//me:{PASSWORD}@")
        done = run("audit", address, "--ledger", "run.db", "--json")
        assert done.returncode == 1, done.stderr
        assert endpoint.headers[0]["Authorization"].startswith("Basic ")
        assert json.loads(done.stdout)["identity"] == endpoint.address
        wrong = run("extract", f"{address}?key={PASSWORD}")
        assert wrong.returncode == 2
    words = done.stdout + done.stderr + wrong.stdout + wrong.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert PASSWORD not in words
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_options_reach_the_endpoint(run, monkeypatch, tmp_path):
    def answer(inputs):
        return [output("other", "FP64", [1], [0.0]), *scores(TARGET)(inputs)]

    endpoint = Endpoint([vectors(-1, name="a"), vectors(-1, name="b")], answer)
    monkeypatch.setenv("KEYHOLE_API_KEY", "k")
    monkeypatch.setenv("X_VALUE", "v")
    with serving(endpoint):
        done = run(
            "extract",
            endpoint.address,
            "--endpoint",
            f"dim={DIM}",
            "--endpoint",
            "input=b",
            "--endpoint",
            "output=answers",
            "--endpoint",
            "batch=3",
            "--endpoint",
            "timeout=30",
            "--rate",
            1000,
            "--header",
            "X-Name=X_VALUE",
            "--method",
            "single-head",
            "--json",
        )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "recovered"
    assert {request["inputs"][0]["name"] for request in endpoint.requests} == {"b"}
    assert max(request["inputs"][0]["shape"][0] for request in endpoint.requests) == 3
    assert {headers["X-Name"] for headers in endpoint.headers} == {"v"}
    assert {headers["Authorization"] for headers in endpoint.headers} == {"Bearer k"}


@pytest.mark.parametrize("command", ["extract", "audit"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("demo", "--endpoint", "batch=4"), "--endpoint batch is for endpoints"),
        (("t.safetensors", "--insecure"), "--insecure is for endpoints, and t.safe"),
        (
            ("http://192.0.2.9/v2/models/m",),
            "192.0.2.9 is another machine: give --authorized",
        ),
        (("http://h/v2/models/m", "--header", TOKEN), "--header takes NAME=VARIABLE"),
        (
            ("http://h/v2/models/m", "--header", f"A={TOKEN}"),
            "names an environment variable",
        ),
        (
            ("http://127.0.0.1:9/v2/models/m", "--endpoint", "timeout=0"),
            "timeout must be above 0",
        ),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, command, words, line):
    oracle.save(TARGET, tmp_path / "t.safetensors")
    done = run(command, *words)
    assert done.returncode == 2
    assert line in done.stderr
    assert TOKEN not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_endpoint_that_takes_texts_is_said_to_be_one(run):
    text = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    with serving(Endpoint([text], lambda _: [])) as endpoint:
        done = run("extract", endpoint.address)
    assert done.returncode == 2
    assert "its input 'text' takes texts (BYTES). keyhole audit" in done.stderr


@pytest.mark.parametrize(
    "words", [("--budget", 10), ("--probe-only",), ("--layers", "all")]
)
def test_options_that_an_endpoint_does_not_follow_are_refused(run, words):
    with serving(Endpoint([vectors(DIM)], scores(TARGET))) as endpoint:
        done = run("audit", endpoint.address, *words)
    assert done.returncode == 2
    assert (
        f"{words[0]} does not apply to the endpoint {endpoint.address}" in done.stderr
    )
    assert not [request for request in endpoint.requests if request.get("inputs")]


def test_a_retrained_model_is_said(run, tmp_path):
    endpoint = Endpoint([vectors(DIM)], scores(TARGET))
    with serving(endpoint):
        first = run("extract", endpoint.address, "--ledger", "run.db")
        endpoint.answer = scores(oracle.plant(dim=DIM, seed=9))
        second = run("extract", endpoint.address, "--ledger", "run.db")
    assert (first.returncode, second.returncode) == (1, 1)
    assert "another model answers" not in first.stderr
    assert "another model answers at" in second.stderr
    assert Path(tmp_path / "run.db").exists()


@pytest.mark.release
@pytest.mark.slow  # a process
def test_ctrl_c_does_not_wait_for_a_server_that_hangs(tmp_path):
    released = threading.Event()

    def hang(inputs):
        released.wait(60)
        return scores(TARGET)(inputs)

    with serving(Endpoint([vectors(DIM)], hang)) as endpoint:
        words = (
            "extract",
            endpoint.address,
            "--endpoint",
            "batch=1",
            "--method",
            "single-head",
        )
        with warm_process.started(
            keyhole, str(tmp_path / "begun"), *words, cwd=tmp_path
        ) as process:
            deadline = time.monotonic() + 60
            while len(endpoint.requests) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(endpoint.requests) == 4  # all connections wait
            process.send_signal(signal.SIGINT)
            done = process.finish(timeout=20)
        released.set()
    assert done.returncode == 130
    assert "keyhole: stopped" in done.stderr
