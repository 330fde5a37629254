"""A planted target behind `keyhole lab serve`, in a process of its own."""

from __future__ import annotations

import signal
import socket
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

import httpx
import pytest

from command_line import started
from keyhole import oracle


@contextmanager
def served(target, folder, *options):
    """The server's address; it is stopped in the end, and has said nothing of a fault."""
    if find_spec("mlserver") is None:  # the server's process imports it, this one need not
        pytest.skip("MLServer is not installed: pip install keyhole[serve]")
    oracle.save(target, folder / "t.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "keyhole",
        "lab",
        "serve",
        "t.safetensors",
        "--port",
        str(port),
    ]
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "log").open("w") as log,
        started([*command, *options], cwd=folder, stdout=log, stderr=log) as process,
    ):
        for _ in range(300):
            try:
                if httpx.get(f"{url}/v2/models/target/ready").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            pytest.fail((folder / "log").read_text())
        yield url
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    assert "Traceback" not in (folder / "log").read_text()
