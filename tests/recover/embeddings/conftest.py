"""A small encoder of random weights."""

from __future__ import annotations

import pytest

import tiny_models as tiny
from keyhole.models import load_model
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.encoder import Encoder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tiny.save("bert", folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def encoder(loaded):
    return Encoder(Target.of(loaded.model, loaded.tokenizer))
