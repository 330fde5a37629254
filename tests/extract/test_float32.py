"""Modules in float32, as people have them: read to the precision of their answers."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests import reference
from torch import nn

from any_function import AnyFunction
from keyhole import extract, oracle
from keyhole.extract import Status
from keyhole.extract.arithmetic import EXACT, digits, own_error
from keyhole.oracle.planted import BiasedHeads

KINDS = (
    "head",
    "bias",
    "biases",
    "LayerNorm",
    "RMSNorm",
    "2 heads",
    "sigmoid",
    "layer",
    "vector",
)


class Module(nn.Module):
    def __init__(self, kind, dim=6, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.dim = dim
        heads = 2 if kind == "2 heads" else 1
        self.W = nn.Parameter(torch.randn(heads, dim, dim) / math.sqrt(dim))
        self.v = nn.Parameter(torch.randn(heads, dim))
        self.V, self.w = (
            nn.Parameter(torch.randn(dim, dim)),
            nn.Parameter(torch.randn(dim)),
        )
        self.c, self.b = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(()))
        self.norm = {
            "LayerNorm": nn.LayerNorm(dim),
            "RMSNorm": nn.RMSNorm(dim, eps=1e-6),
        }.get(kind, nn.Identity())
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        self.to(dtype)

    @torch.no_grad()
    def forward(self, sequences):
        X = self.norm(sequences.to(self.W.dtype))
        scores = torch.einsum("bnd,hde,be->bhn", X, self.W, X[:, -1])
        if self.kind == "biases":
            scores = scores + (X @ self.c).unsqueeze(1)
        A = scores.softmax(-1)
        if self.kind in ("layer", "vector"):
            hidden = torch.einsum("bhn,bnd->bd", A, X) @ self.V
            return (
                hidden if self.kind == "vector" else hidden.relu() @ self.w
            ).double()
        answers = torch.einsum("bhn,bnd,hd->b", A, X, self.v)
        if self.kind in ("bias", "biases", "sigmoid"):
            answers = answers + self.b
        return (answers.sigmoid() if self.kind == "sigmoid" else answers).double()


def fresh(dim, length, count=16):
    stream = torch.Generator().manual_seed(7)
    return torch.randn(count, length, dim, generator=stream, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_recovered_to_the_precision_of_the_answers(kind):
    module = Module(kind)
    result = extract.run(module)
    assert result.status is Status.RECOVERED, result.reason
    exact = copy.deepcopy(module).double()
    for length in (1, 2, 5):
        X = fresh(module.dim, length)
        truth = exact(X)
        assert (result.model(X) - truth).abs().max() <= 2e-5 * truth.abs().max()


@pytest.mark.parametrize("bias", [True, False])
def test_two_heads_of_torch_are_read_where_every_token_answers(bias):
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True).eval()

    def answers(X):
        with torch.no_grad():
            return layer(X.float(), X.float(), X.float(), need_weights=False)[
                0
            ].double()

    result = extract.run(
        AnyFunction(answers, 8)
    )  # far tokens must not overflow next to each other
    assert result.status is Status.RECOVERED, result.reason
    X = fresh(8, 4)
    truth = answers(X)
    assert (result.model(X) - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("kind", ["biases", "LayerNorm", "RMSNorm"])
def test_biases_and_norms_are_read_exactly_from_float64(kind, tmp_path):
    module = Module(kind, dtype=torch.float64)
    result = extract.run(module)
    assert result.status is Status.RECOVERED, result.reason
    X = fresh(module.dim, 4)
    assert (result.model(X) - module(X)).abs().max() <= 1e-11
    oracle.save(result.model, tmp_path / "model.safetensors")
    assert torch.equal(oracle.load(tmp_path / "model.safetensors")(X), result.model(X))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_other_kind(dtype):
    result = extract.run(Module("head", dtype=dtype))
    assert result.status in (Status.RECOVERED, Status.WITHIN, Status.INEXACT), (
        result.reason
    )


def test_a_block_in_float32_is_not_called_broken():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0, norm_first=True, batch_first=True
    )

    def answers(X):
        with torch.no_grad():
            return layer.eval()(X.float()).double()[:, -1]

    result = extract.run(AnyFunction(answers, 8))  # long tokens overflow its norms
    assert result.status is Status.UNVERIFIED
    assert "float64 would do" in result.reason


def test_positions_in_float32_are_another_kind():
    class Positions(Module):
        def forward(self, sequences):
            bias = 0.5 * torch.arange(sequences.shape[1], dtype=sequences.dtype)
            moved = sequences + bias[:, None] * self.c.double()
            return super().forward(moved)

    assert extract.run(Positions("head", dim=3)).status not in (
        Status.RECOVERED,
        Status.INEXACT,
    )


def test_precision_is_read_off_the_digits():
    values = torch.randn(20, dtype=torch.float64)
    assert digits(values) <= EXACT
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert digits(values.to(dtype).double()) == torch.finfo(dtype).eps / 2
    printed = torch.tensor(
        [float(str(x)) for x in values.float().numpy()], dtype=torch.float64
    )
    assert digits(printed) == torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("kind", ["head", "LayerNorm", "2 heads"])
def test_the_own_error_of_answers_bounds_what_they_are_off_by(kind):
    module = Module(kind, dim=16)
    exact = copy.deepcopy(module).double()
    X = fresh(16, 4, 64)
    answers = module(X)
    error = own_error(module, X, answers, torch.finfo(torch.float32).eps / 2)
    assert ((answers - exact(X)).abs() <= 16 * error).all()
    assert error.max() <= 1e-4 * answers.abs().max()


def test_biased_heads_are_what_a_naive_loop_says():
    stream = np.random.default_rng(0)
    W = stream.normal(size=(2, 3, 3))
    v = stream.normal(size=(2, 3))
    c = stream.normal(size=(2, 3))
    X = stream.normal(size=(5, 3))
    for normed, centred in ((False, False), (True, False), (True, True)):
        tensors = (torch.from_numpy(part) for part in (W, v, c))
        b = torch.tensor([0.3], dtype=torch.float64)
        model = BiasedHeads(*tensors, b, normed, centred, 1e-3)
        expected = reference.biased_heads(X, W, v, c, 0.3, normed, centred, 1e-3)
        assert float(model(torch.from_numpy(X)[None])) == pytest.approx(
            expected, rel=1e-13
        )
