"""A planted target behind examples/serve_target.py, in a process of its own."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

import warm_process
from keyhole import oracle

EXAMPLE = Path(__file__).parent.parent / "examples" / "serve_target.py"


@contextmanager
def served(target, folder, *options):
    """Serve a target and yield its address; check that the server reported no fault."""
    if find_spec("mlserver") is None:  # only the server's process imports it
        pytest.skip("MLServer is not installed: pip install mlserver")
    oracle.save(target, folder / "t.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = (str(EXAMPLE), "t.safetensors", "--port", str(port), *options)
    with warm_process.started(warm_process.script, *command, cwd=folder) as process:
        for _ in range(300):
            try:
                if httpx.get(f"{url}/v2/models/target/ready").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            pytest.fail(process.words)
        printed = " ".join(process.out.split())
        assert printed.startswith("serving t.safetensors")
        assert f" at {url}/v2/models/target (Ctrl-C ends it)" in printed
        yield url
        process.send_signal(signal.SIGINT)
        done = process.finish(30)
    assert "Traceback" not in done.stdout + done.stderr
