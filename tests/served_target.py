"""A planted target behind `keyhole lab serve`, in a process of its own."""

from __future__ import annotations

import signal
import socket
import sys
import time
import warnings
from contextlib import contextmanager
from importlib.util import find_spec

import httpx
import pytest

import warm_process
from keyhole import oracle
from keyhole.cli import main


@contextmanager
def served(target, folder, *options):
    """Serve a target and yield its address; check that the server reported no fault."""
    if find_spec("mlserver") is None:  # only the server's process imports it
        pytest.skip("MLServer is not installed: pip install keyhole[serve]")
    oracle.save(target, folder / "t.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ("lab", "serve", "t.safetensors", "--port", port)
    with warm_process.started(_keyhole, *command, *options, cwd=folder) as process:
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


def _keyhole(*arguments):
    warnings.simplefilter("default")  # MLServer's own warnings are no errors
    sys.argv = ["keyhole", *map(str, arguments)]
    main()
