"""A stolen last layer beside the true one: what the best linear map leaves of the difference.

The truth is W (v, d); what is known of it is a basis B of its columns, for some tokens i and, from
log-probabilities, up to a row that is added to all. The best map A and row c minimise

    ‖W − B A − 1 cᵀ‖_F      A = Bᵀ(W − 1 wᵀ),  w the mean row of W

because B is orthonormal and, there, orthogonal to 1. Only the judge and benchmarks see W.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.models.demo import open_model
from keyhole.models.next_token import unembedding
from keyhole.oracle.output_matrix import OutputMatrix


def true_matrix(reference: str | Path) -> tuple[Tensor, bool]:
    """The matrix of a model's file or folder, in float64, and whether it is the inputs' table."""
    model = open_model(str(reference), task="causal").model
    W = unembedding(model).weight
    return W.detach().double().cpu(), W is model.get_input_embeddings().weight


def compared(result: Extraction, reference: str | Path) -> Extraction:
    """The same result, with how far its matrix is from the one that the reference holds."""
    layer, model = result.layer, result.model
    if layer is None or not isinstance(model, OutputMatrix):
        return result
    W, tied = true_matrix(reference)
    if len(W) < layer.vocabulary:
        raise InputError(
            f"expected a reference with {layer.vocabulary:,} tokens, got {len(W):,} in {reference}"
        )
    rms, relative = distance(model, W, centred=layer.log_probabilities)
    layer = replace(layer, rms=rms, relative=relative, tied=tied)
    opening = result.reason.split("; ")[0]
    return replace(result, layer=layer, reason=f"{opening}; {layer}")


def distance(model: OutputMatrix, truth: Tensor, *, centred: bool) -> tuple[float, float]:
    """The RMS of what the best map leaves of W, and relative to that of W itself."""
    W = truth[model.tokens.long()]
    if centred:
        W = W - W.mean(0)
    left = model.outside(W.mT)
    rms = float(left.square().mean().sqrt())
    return rms, rms / float(W.square().mean().sqrt().clamp(min=torch.finfo(W.dtype).tiny))
