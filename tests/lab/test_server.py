"""What `keyhole lab serve` makes of a target, without the network in between."""

from __future__ import annotations

import asyncio

import pytest
import torch

from keyhole import oracle


@pytest.mark.parametrize("in_file", [None, oracle.Degradation(max_norm=1.0)])
def test_a_served_target_degrades_its_answers(in_file, tmp_path):
    pytest.importorskip(
        "mlserver", reason="it is not installed: pip install keyhole[serve]"
    )
    from mlserver import ModelSettings
    from mlserver.codecs import NumpyCodec
    from mlserver.settings import ModelParameters
    from mlserver.types import InferenceRequest

    from keyhole.lab.server import TargetRuntime

    target = oracle.plant(dim=4, seed=1)
    path = tmp_path / "t.safetensors"
    oracle.save(target, path, in_file)
    change = oracle.Degradation(decimals=1, sign_only=False)
    parameters = ModelParameters(uri=str(path), extra=change.to_flags())
    settings = ModelSettings(
        name="t", implementation=TargetRuntime, parameters=parameters
    )
    runtime = TargetRuntime(settings)
    assert asyncio.run(runtime.load())
    X = torch.randn(
        20, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    expected = oracle.Rounded(oracle.load(path), 1)
    request = InferenceRequest(inputs=[NumpyCodec.encode_input("sequences", X.numpy())])
    (answer,) = asyncio.run(runtime.predict(request)).outputs
    assert NumpyCodec.decode_output(answer).ravel().tolist() == expected(X).tolist()
