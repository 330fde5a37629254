"""`keyhole extract` and `keyhole audit` of an endpoint: options and secrets."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time

import psutil
import pytest
from endpoint_server import Endpoint, output, scores, self_signed, serving, vectors

import kill_points
import warm_process
from command_line import KEYHOLE, started
from keyhole import oracle

DIM = 4
TARGET = oracle.plant(dim=DIM, seed=3)
TOKEN = "tok-3n-f0r-t3sts-0nly"
PASSWORD = "passw0rd-f0r-t3sts"


def scoring():
    return Endpoint([vectors(DIM)], scores(TARGET))


@pytest.mark.slow  # a process
@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_a_token_is_sent_and_stands_nowhere_else(tmp_path, keyhole, monkeypatch):
    """It is not in the list of processes, in the output, or in any file."""
    endpoint = scoring()
    endpoint.token = f"Bearer {TOKEN}"
    (tmp_path / "tls").mkdir()
    certificate = self_signed(tmp_path / "tls")
    monkeypatch.setenv("MY_TOKEN", f"Bearer {TOKEN}")
    seen: list[str] = []
    reach = "--header Authorization=MY_TOKEN --ca tls/certificate.pem"
    with serving(endpoint, certificate):
        view = f"--debug extract {endpoint.address} {reach} --ledger run.db --json"
        command = f"{view} --out stolen.json".split()
        with started([*KEYHOLE, *command], cwd=tmp_path) as process:
            seen.append(" ".join(psutil.Process(process.pid).cmdline()))
            out, words = process.communicate(timeout=120)
            seen += [out, words]
            assert process.returncode == 1, words
        done = keyhole("audit", endpoint.address, reach, "--ledger audit.db")
        assert done.returncode == 1, done.stderr
        seen += [done.stdout, done.stderr]
        # the server repeats what is wrong
        monkeypatch.setenv("MY_TOKEN", f"Bearer wrong-{TOKEN}")
        for name in ("extract", "audit"):
            view = f"--debug {name} {endpoint.address} {reach}"
            done = keyhole(view, "--ledger run.db --force")
            assert done.returncode == 3, done.stderr
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


def test_a_password_of_an_address_is_written_nowhere(tmp_path, keyhole):
    endpoint = scoring()
    with serving(endpoint):
        address = endpoint.address.replace("//", f"//me:{PASSWORD}@")
        done = keyhole("audit", address, "--ledger run.db --json")
        assert done.returncode == 1, done.stderr
        assert endpoint.headers[0]["Authorization"].startswith("Basic ")
        assert json.loads(done.stdout)["identity"] == endpoint.address
        wrong = keyhole(f"extract {address}?key={PASSWORD}")
        assert wrong.returncode == 2
    words = done.stdout + done.stderr + wrong.stdout + wrong.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert PASSWORD not in words
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_options_reach_the_endpoint(keyhole, monkeypatch):
    def answer(inputs):
        return [output("other", "FP64", [1], [0.0]), *scores(TARGET)(inputs)]

    endpoint = Endpoint([vectors(-1, name="a"), vectors(-1, name="b")], answer)
    monkeypatch.setenv("KEYHOLE_API_KEY", "k")
    monkeypatch.setenv("X_VALUE", "v")
    with serving(endpoint):
        done = keyhole(
            f"extract {endpoint.address} --method single-head --json --rate 1000",
            f"--endpoint dim={DIM} --endpoint input=b --endpoint output=answers",
            "--endpoint batch=3 --endpoint timeout=30 --header X-Name=X_VALUE",
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
        ("demo --endpoint batch=4", "--endpoint batch is for endpoints"),
        ("t.safetensors --insecure", "--insecure is for endpoints, and t.safe"),
        (
            "http://192.0.2.9/v2/models/m",
            "192.0.2.9 is another machine: give --authorized",
        ),
        (f"http://h/v2/models/m --header {TOKEN}", "--header takes NAME=VARIABLE"),
        (f"http://h/v2/models/m --header A={TOKEN}", "names an environment variable"),
        (
            "http://127.0.0.1:9/v2/models/m --endpoint timeout=0",
            "timeout must be above 0",
        ),
    ],
)
def test_wrong_options_are_one_line(keyhole, tmp_path, command, words, line):
    oracle.save(TARGET, tmp_path / "t.safetensors")
    done = keyhole(command, words)
    assert done.returncode == 2
    assert line in done.stderr
    assert TOKEN not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_endpoint_that_takes_texts_is_said_to_be_one(keyhole):
    text = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    with serving(Endpoint([text], lambda _: [])) as endpoint:
        done = keyhole("extract", endpoint.address)
    assert done.returncode == 2
    assert "its input 'text' takes texts (BYTES). keyhole audit" in done.stderr


@pytest.mark.parametrize("words", ["--budget 10", "--probe-only", "--layers all"])
def test_options_that_an_endpoint_does_not_follow_are_refused(keyhole, words):
    with serving(scoring()) as endpoint:
        done = keyhole("audit", endpoint.address, words)
    assert done.returncode == 2
    option = words.split()[0]
    refused = f"{option} does not apply to the endpoint {endpoint.address}"
    assert refused in done.stderr
    assert not [request for request in endpoint.requests if request.get("inputs")]


def test_a_retrained_model_is_said(keyhole):
    endpoint = scoring()
    with serving(endpoint):
        first = keyhole("extract", endpoint.address, "--ledger run.db")
        endpoint.answer = scores(oracle.plant(dim=DIM, seed=9))
        second = keyhole("extract", endpoint.address, "--ledger run.db")
    assert (first.returncode, second.returncode) == (1, 1)
    assert "another model answers" not in first.stderr
    assert "another model answers at" in second.stderr


@pytest.mark.release
@pytest.mark.slow  # a process
def test_ctrl_c_does_not_wait_for_a_server_that_hangs(tmp_path):
    released = threading.Event()

    def hang(inputs):
        released.wait(60)
        return scores(TARGET)(inputs)

    with serving(Endpoint([vectors(DIM)], hang)) as endpoint:
        view = f"extract {endpoint.address} --endpoint batch=1 --method single-head"
        begun = (kill_points.keyhole, str(tmp_path / "begun"))
        with warm_process.started(*begun, *view.split(), cwd=tmp_path) as process:
            deadline = time.monotonic() + 60
            while len(endpoint.requests) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(endpoint.requests) == 4  # all connections wait
            process.send_signal(signal.SIGINT)
            done = process.finish(timeout=20)
        released.set()
    assert done.returncode == 130
    assert "keyhole: stopped" in done.stderr
