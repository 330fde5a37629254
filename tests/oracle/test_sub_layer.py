"""Sub-layers answer as the naive witness does, also after they were saved and loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from planted_sub_layers import BERT, LLAMA, planted
from reference_sub_layers import sub_layer

from keyhole import oracle
from keyhole.core.errors import InputError

CASES = {
    "attention alone": BERT,
    "residual": {**BERT, "residual": True},
    "a Llama's": LLAMA,
    "a Llama's, every token": {**LLAMA, "every_token": True},
    "every token sees all": {**BERT, "every_token": True, "rotary": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_follow_the_formula(case, tmp_path):
    target = planted(**case)
    stream = torch.Generator().manual_seed(1)
    X = torch.randn(3, 5, target.dim, generator=stream, dtype=torch.float64)
    tensors = {n: part.numpy() for n, part in target.tensors().items() if n != "places"}
    # The last token sees every key, masked or not.
    for tokens, answer in zip(X, target(X), strict=True):
        expected = sub_layer(
            tokens.numpy(),
            **tensors,
            epsilon=target.epsilon,
            residual=target.residual,
            causal=target.causal,
        )
        expected = expected if target.every_token else expected[-1]
        np.testing.assert_allclose(answer, expected, atol=1e-13)
    oracle.save(target, tmp_path / "t.safetensors")
    again = oracle.load(tmp_path / "t.safetensors")
    assert again.identity == target.identity
    torch.testing.assert_close(again(X), target(X), rtol=0, atol=1e-13)


def test_symmetries_change_nothing_and_are_not_counted():
    """Any matrix between V and O, and one complex number for each plane between Q and K."""
    target = planted(**LLAMA)
    T = torch.randn(
        4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    # every plane by a + bi; its inverse transposed on the other side
    a = 0.7
    b = -1.3
    eye = torch.eye(2, dtype=torch.float64)
    turn = torch.cat(
        [torch.cat([a * eye, b * eye], 1), torch.cat([-b * eye, a * eye], 1)]
    )
    same = replace(
        target,
        V=target.V @ T,
        O=torch.linalg.inv(T) @ target.O,
        K=target.K @ turn,
        Q=target.Q @ torch.linalg.inv(turn).mT,
        q=target.q @ torch.linalg.inv(turn).mT,
    )
    X = torch.randn(
        2, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert torch.allclose(same(X), target(X), rtol=0, atol=1e-12)
    parameters = sum(part.numel() for part in target.tensors().values())
    assert target.unknowns == parameters - 2 * (4 + 4 * 4) + 1
    assert planted().unknowns == 3 * (4 * 12 * 4 - 2 * 4 * 4 + 4) + 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": torch.zeros(2, 12, 4, dtype=torch.float64)}, "expected V of shape"),
        ({"q": torch.zeros(3, 5, dtype=torch.float64)}, "expected q of shape"),
        (
            {"frequencies": torch.zeros(3, 1, dtype=torch.float64)},
            "expected 2 frequencies or none",
        ),
        ({"epsilon": 0.0}, "an epsilon must be above 0"),
        ({"b": torch.zeros(12)}, "expected b in float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(planted(), **change)
