"""What examples/serve_target.py makes of a target, without the network in between."""

from __future__ import annotations

import asyncio

import pytest
import torch

from keyhole import oracle


@pytest.mark.parametrize("in_file", [None, oracle.Defence(max_norm=1.0)])
def test_a_served_target_degrades_its_answers(in_file, tmp_path):
    pytest.importorskip("mlserver", reason="it is not installed: pip install mlserver")
    from mlserver.codecs import NumpyCodec
    from mlserver.types import InferenceRequest

    from serve_target import TargetRuntime, settings_of

    target = oracle.plant(dim=4, seed=1)
    path = tmp_path / "t.safetensors"
    oracle.save(target, path, in_file)
    runtime = TargetRuntime(settings_of(path, "t", ["decimals=1"]))
    assert asyncio.run(runtime.load())
    X = torch.randn(
        20, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    expected = oracle.Rounded(oracle.load(path), 1)
    request = InferenceRequest(inputs=[NumpyCodec.encode_input("sequences", X.numpy())])
    (answer,) = asyncio.run(runtime.predict(request)).outputs
    assert NumpyCodec.decode_output(answer).ravel().tolist() == expected(X).tolist()
