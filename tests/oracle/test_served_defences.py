"""Every defence that examples/serve_target.py offers, over HTTP."""

from __future__ import annotations

from contextlib import closing, contextmanager

import pytest
import torch

import served_target
from keyhole import oracle
from keyhole.oracle import Defence, OpenInference, Refused
from keyhole.oracle.defences import refusal

pytestmark = pytest.mark.slow  # servers
DIM = 6
TARGET = oracle.plant(dim=DIM, seed=3)


def draw(count: int, n: int = 3) -> torch.Tensor:
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randn(count, n, DIM, dtype=torch.float64, generator=stream)
    return 2 * torch.nn.functional.normalize(tokens, dim=-1)


@contextmanager
def served(folder, *options):
    with (
        served_target.served(TARGET, folder, *options) as url,
        closing(OpenInference(url, "target", retries=3)) as remote,
    ):
        yield remote


def test_served_defences_equal_the_wrappers(tmp_path):
    options = [
        "-o",
        "noise=0.1",
        "-o",
        "decimals=2",
        "-o",
        "max_norm=1.5",
        "-o",
        "seed=4",
        "-o",
        "min_tokens=3",
        "-o",
        "max_tokens=5",
        "-o",
        "usual_norm=2",
    ]
    defence = Defence.of_answers(word for word in options if word != "-o")
    with served(tmp_path, *options) as remote:
        X = torch.stack([x for x in draw(40) if not refusal(defence, x[None])])
        assert len(X) > 10
        assert torch.equal(remote(X), oracle.defended(TARGET, defence)(X))
        assert not torch.equal(remote(X), TARGET(X))
        for question, reason in (
            (draw(1, 2), "need 3 tokens or more, not 2"),
            (draw(1, 6), "at most 5 tokens, not 6"),
            (3 * X[:1], "norm is not between 1 and 4"),
            (2 * torch.eye(DIM, dtype=torch.float64)[None, :3], "along one coordinate"),
            (X[:1, [0, 0, 1]], "along one direction"),
        ):
            with pytest.raises(Refused, match=reason) as refused:
                remote(question)
            assert refused.value.status == 422
