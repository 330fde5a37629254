"""Prompts of vectors; tests/audit/test_servers.py compares answers with the model's own."""

from __future__ import annotations

from contextlib import closing

import hostile
import pytest
import torch

from keyhole.core.errors import InputError
from keyhole.oracle import OracleError, VectorPrompts
from keyhole.oracle.probe import Server


def test_vectors_are_for_servers_that_take_them():
    with pytest.raises(InputError, match="needs a server of vLLM or SGLang, not llama"):
        VectorPrompts(Server("http://127.0.0.1:9", "llama.cpp", "tiny"), 8)


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"choices": [{"logprobs": {"top_logprobs": [[]]}}]}',
        '{"meta_info": {"output_top_logprobs": [[1]]}}',
    ],
)
def test_an_answer_of_an_unknown_form_is_an_error(kind, content):
    with (
        hostile.Server(hostile.answer(content), "infer") as server,
        closing(VectorPrompts(Server(server.url, kind, "tiny"), 3)) as oracle,
        pytest.raises(OracleError, match="gave 0 log-probabilities instead of 5"),
    ):
        oracle(torch.zeros(1, 2, 3, dtype=torch.float64))
