"""Functions of token ids whose last layer is known: a norm, a matrix, biases or none."""

from __future__ import annotations

import torch

WORDS = 300
WIDTH = 24


class PlantedLogits:
    """Something nonlinear of four tokens, then a norm and the matrix W (300, 24)."""

    def __init__(
        self, norm="rms", bias=False, logarithms=True, cap=0.0, words=WORDS, width=WIDTH
    ):
        draw = torch.Generator().manual_seed(5)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.W, self.table, self.mix = (
            normal(words, width),
            normal(words, 16),
            normal(64, width),
        )
        self.bias, self.shift = normal(words), normal(width)
        self.norm = norm
        self.biased = bias
        self.logarithms = logarithms
        self.cap = cap
        self.asked = []

    def states(self, ids):
        x = torch.tanh(self.table[ids].flatten(1) @ self.mix)
        if self.norm == "rms":
            return x / x.square().mean(1, keepdim=True).sqrt()
        x = torch.nn.functional.layer_norm(x, x.shape[1:])
        return x + self.shift if self.norm == "layer, biased" else x

    def __call__(self, ids):
        self.asked += ids.tolist()
        y = self.states(ids) @ self.W.T + (self.bias if self.biased else 0)
        if self.cap:
            y = self.cap * torch.tanh(y / self.cap)
        return y.log_softmax(1) if self.logarithms else y
