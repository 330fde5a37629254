"""Log-probabilities from llama.cpp's own server, compared with a plain request."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial

import httpx
import numpy as np
import pytest
import torch
from hostile import Server, answer

import tiny_gguf
from keyhole.core.errors import InputError
from keyhole.oracle import OracleError, ask
from keyhole.oracle.completions import OPENAI, Completions, parse_entries
from keyhole.oracle.http import Http, Refused
from keyhole.oracle.token_questions import ABSENT, Logits, parts_of, question

PROMPT = torch.tensor([40, 41, 42, 43])
WORDS = 258


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    tiny_gguf.expect_server()
    path = tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    with tiny_gguf.serving(path) as address:
        yield address


@pytest.fixture(scope="module")
def plain(url):
    """The log-probabilities that a plain request returns, by token."""
    content = {
        "prompt": PROMPT.tolist(),
        "n_predict": 1,
        "n_probs": 300,
        "cache_prompt": False,
        "logit_bias": [[60, 100.0]],
    }
    answer = httpx.post(f"{url}/completion", json=content, timeout=60).json()
    entries = answer["completion_probabilities"][0]["top_logprobs"]
    return torch.tensor(
        [value for _, value in sorted((e["id"], e["logprob"]) for e in entries)],
        dtype=torch.float64,
    )


@pytest.fixture(params=["/completion", "/v1/completions"])
def server(request, url):
    with closing(Completions.at(f"{url}{request.param}")) as made:
        yield made


def test_log_probabilities_of_all_one_and_several_tokens(server, plain):
    assert (server.dim, server.vocabulary, server.width) == (2, WORDS, tiny_gguf.WIDTH)
    for number in range(
        8
    ):  # after some prompts half a character follows, with no answer
        answer = ask(server, question(PROMPT + number))[0]
        assert answer.shape == (WORDS,)
        assert (
            bool((answer == ABSENT).all())
            or abs(float(torch.logsumexp(answer, 0))) < 1e-4
        )
    raised = torch.tensor([60, 61, 150, 3])
    biases = torch.tensor([40.0, 24.0, 24.0, 24.0])
    several = ask(server, question(PROMPT, raised, biases))[0]
    assert torch.allclose(
        several - several[0], plain[raised] - plain[60], rtol=0, atol=2e-5
    )
    alone = ask(server, question(PROMPT, raised[1:2], biases[1:2]))[0]
    assert torch.allclose(alone, plain[raised[1:2]], rtol=0, atol=1e-4)
    half = ask(server, question(PROMPT, torch.tensor([150]), biases[:1]))[0]
    assert float(half) == ABSENT  # a byte that is no character
    too_low = ask(server, question(PROMPT, raised, biases * 0 - 30.0))[0]
    assert float(too_low.max()) == ABSENT


def test_answers_are_whole_once_a_suitable_token_is_known(url, plain):
    with closing(Completions.at(url)) as server:
        answers = torch.cat(
            [ask(server, question(PROMPT + number)) for number in range(12)]
        )
        again = ask(server, question(PROMPT))[0]
    known = [
        number for number, answer in enumerate(answers) if float(answer.min()) > ABSENT
    ]
    assert known == list(range(known[0], 12))
    assert torch.allclose(again, plain, rtol=0, atol=1e-6)


def written(values, text):
    entries = [
        {"id": n, "token": text, "bytes": [1, 2], "logprob": v} for n, v in values
    ]
    first = {
        "id": 0,
        "token": text,
        "bytes": [],
        "logprob": -1.5,
        "top_logprobs": entries,
    }
    answer = {"content": text, "completion_probabilities": [first], "prompt": text}
    return json.dumps(answer, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "text",
    [
        "a",
        '"',
        "\\",
        '\\"',
        '{"id":7,"token":"x","bytes":[1],"logprob":-3.5}',
        "\u00e9\u2028",
        "{",
    ],
)
def test_parse_entries_agrees_with_a_json_parser(text):
    """For any text of a token, since the server is not trusted."""
    draw = np.random.default_rng(0)
    values = list(zip(range(1500), (-draw.exponential(10, 1500)).tolist(), strict=True))
    draw.shuffle(values)
    body = written(values, text)
    entries = json.loads(body)["completion_probabilities"][0]["top_logprobs"]
    ids, numbers = parse_entries(bytearray(body))
    assert ids.tolist() == [entry["id"] for entry in entries]
    assert numbers.tolist() == [entry["logprob"] for entry in entries]
    few = written([(2, -0.5), (0, -1.5), (1, -2.5)], text)
    assert parse_entries(bytearray(few)) is None  # left to the parser
    by_id = [value for _, value in sorted(values)]
    for content, expected in ((body, by_id), (few, [-1.5, -2.5, -0.5])):
        assert answered(content, question(PROMPT)) == expected


def answered(content, asked, **settings):
    """Return what Completions reads from a server's answer with this body."""
    with (
        Server(answer(content), "infer") as server,
        closing(Completions(server.url, **settings)) as completions,
    ):
        return ask(completions, asked)[0].tolist()


def test_the_form_of_vllm():
    """From its documentation: the best tokens as `token_id:…`, and the sampled token."""
    best = {"token_id:1": -0.5, "token_id:2": -2.5, "token_id:0": -3.5}
    given = {"tokens": ["token_id:2"], "token_logprobs": [-2.5], "top_logprobs": [best]}
    content = json.dumps({"choices": [{"text": "x", "logprobs": given}]})
    asked = partial(answered, route=OPENAI)
    assert asked(content, question(PROMPT)) == [-3.5, -0.5, -2.5]
    for token, expected in ((2, -2.5), (1, ABSENT)):
        raised = question(PROMPT, torch.tensor([token]), torch.tensor([1.0]))
        assert asked(content, raised) == [expected]
    assert asked('{"choices": []}', question(PROMPT), vocabulary=3) == [ABSENT] * 3


@pytest.mark.parametrize("route", ["/completion", OPENAI])
def test_no_more_is_asked_for_than_the_server_has(monkeypatch, route):
    asked = []

    def ask_for(http, method, url, request, **rest):
        asked.append(request.get("n_probs", request.get("logprobs")))
        return {}

    monkeypatch.setattr(Http, "ask", ask_for)
    with closing(
        Completions("http://127.0.0.1:1", route=route, vocabulary=9, most=5)
    ) as server:
        ask(server, question(PROMPT))
        assert asked == [5]
        with pytest.raises(
            OracleError, match="at most 5 log-probabilities at a time, not 6: give"
        ):
            ask(server, question(PROMPT, torch.arange(6), torch.ones(6)))
    with closing(
        Completions("http://127.0.0.1:1", route=route, vocabulary=9)
    ) as server:
        ask(server, question(PROMPT))
    assert asked == [5, 9]


def test_a_refusal_of_whole_answers_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise Refused("400: logprobs must not exceed 20", 400)

    monkeypatch.setattr(Http, "ask", refuse)
    with (
        closing(Completions("http://127.0.0.1:1", route=OPENAI)) as server,
        pytest.raises(
            OracleError, match=r"must not exceed 20: if it gives no whole .* -o top=N"
        ),
    ):
        ask(server, question(PROMPT))


def test_a_server_without_probabilities():
    raised = question(PROMPT, torch.tensor([5, 6]), torch.tensor([60.0, 61.0]))
    for content in (
        '{"content": "x", "tokens": [6]}',
        '{"choices": [{"token_ids": [6]}]}',
    ):
        assert answered(content, raised) == [ABSENT, 0.0]
    assert answered('{"content": "x"}', raised) == [ABSENT, ABSENT]


@pytest.mark.parametrize("route", ["/completion", OPENAI])
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '"x"',
        "7",
        '{"choices": [7]}',
        '{"choices": 7}',
        '{"choices": [{"logprobs": {"a": 1}}]}',
        '{"choices": [{"logprobs": [1]}]}',
        '{"completion_probabilities": [7]}',
    ],
)
def test_an_answer_of_an_unknown_form_counts_as_absent(route, content):
    for count in (1, 2):
        raised = question(PROMPT, torch.arange(1, count + 1), torch.ones(count))
        assert answered(content, raised, route=route) == [ABSENT] * count
    assert (
        answered(content, question(PROMPT), route=route, vocabulary=2) == [ABSENT] * 2
    )


def test_questions_are_prompts_and_raised_tokens():
    rows = question(PROMPT, torch.tensor([5, 5]), torch.tensor([1.0, -2.0]))[0]
    prompt, raised, biases = parts_of(rows)
    assert torch.equal(prompt, PROMPT)
    assert (raised.tolist(), biases.tolist()) == ([5, 5], [1.0, -2.0])
    with pytest.raises(InputError, match="needs a bias other than 0"):
        question(PROMPT, torch.tensor([5]), torch.tensor([0.0]))
    with pytest.raises(InputError, match="route must be one of"):
        Completions("http://127.0.0.1:1", route="/v1/chat/completions")
    squares = Logits(lambda ids: ids.double() ** 2)
    assert ask(squares, question(PROMPT)).tolist() == [[1600.0, 1681.0, 1764.0, 1849.0]]
    chosen = question(PROMPT, torch.tensor([3, 0]), torch.tensor([1.0, 1.0]))
    assert ask(squares, chosen).tolist() == [[1849.0, 1600.0]]


def test_a_server_that_samples_half_a_character(monkeypatch, url):
    """If llama.cpp samples half a character, its log-probabilities are null."""
    with closing(Completions.at(f"{url}/v1/completions")) as server:
        said = {"choices": [{"text": "\ufffd", "logprobs": None}]}
        monkeypatch.setattr(Http, "ask", lambda *_, **__: said)
        raised = question(PROMPT, torch.tensor([60, 61]), torch.tensor([-30.0, -30.0]))
        assert ask(server, raised)[0].tolist() == [ABSENT, ABSENT]
