"""Servers of language models: llama.cpp itself, and stand-ins that answer as vLLM and SGLang do."""

from __future__ import annotations

import base64
import io
import json
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch

import keyhole
import tiny_gguf
import tiny_models as tiny
from exposures import by_name
from keyhole.assess import assess
from keyhole.audit import servers as last_layers
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.oracle import EndpointOptions, VectorPrompts
from keyhole.oracle.completions import Completions
from keyhole.oracle.probe import ROUTES, SAFE, Server
from keyhole.oracle.protocol import OracleError
from keyhole.report import json_form, words

LAST_LAYER = "last layer from POST /completion of llama.cpp"
EMBEDDINGS = "POST /embeddings of llama.cpp"
TEXTS = ["the doctor says no", "meet me", "at noon", "and then"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    tiny_gguf.expect_server()
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def by_exposure(audit):
    return by_name(audit.findings)


def rows_of(audit):
    """The assessed findings as the JSON has them."""
    document = json_form.document(assess(audit))
    return {row["exposure"]: row for row in document["assessment"]["findings"]}


def proved_without_comparison(audit):
    """Rows called proved without a text, a weight or a vector that the judge compared."""
    compared = {
        words.exposure(finding.exposure)
        for finding in audit.findings
        if finding.error is not None  # of weights and vectors, how far they are off
        or any(reading.verified for cell in finding.texts for reading in cell.readings)
    }
    rows = rows_of(audit)
    return [
        name for name, row in rows.items() if row["proved"] and name not in compared
    ]


def test_text_from_the_states_of_llama_cpp(weights, data):
    with tiny_gguf.serving(weights, "pooling=NONE") as url:
        audit = keyhole.audit(url, model=str(weights), data=data, texts=2)
    given = by_exposure(audit)
    states = given["token states: POST /embeddings of llama.cpp"]
    assert states.status is Status.EXPOSED
    assert states.command == ""  # the audit itself tries it
    assert "8 rows of 64 numbers" in states.reason
    text = given["text from POST /embeddings of llama.cpp"]
    assert (text.status, text.known) == (Status.RECOVERED, 1.0)
    assert text.reason.startswith("2 of 2 texts exact and verified")
    assert proved_without_comparison(audit) == []
    rows = rows_of(audit)
    row = rows["token states: POST /embeddings of llama.cpp"]
    assert (row["outcome"], row["exact"], row["proved"]) == ("exposed", None, False)
    assert rows["text from POST /embeddings of llama.cpp"]["score"] == 10 > row["score"]
    stated = assess(audit, returns=("labels",))  # which is not what it gives
    assert (stated.hypothetical, stated.exit_code) == ((), 1)
    assert words.assumed(assess(audit)) == ""  # it was asked
    assert [reading.original for reading in text.texts[0].readings] == TEXTS[:2]
    assert audit.exit_code == 1


def test_log_probabilities_and_slots_of_llama_cpp(weights, data):
    with tiny_gguf.serving(weights, f"slots={weights.parent}/") as url:
        audit = keyhole.audit(url, model=str(weights), data=data, texts=4, budget=1024)
        assert not list(weights.parent.glob("*.bin"))  # the probe writes nothing
        saved = httpx.post(
            f"{url}/slots/0?action=save", json={"filename": "slot.bin"}, timeout=60
        )
        saved.raise_for_status()
    given = by_exposure(audit)
    whole = given["log-probabilities: POST /completion of llama.cpp"]
    assert (whole.status, whole.reason.split(": ")[1]) == (
        Status.EXPOSED,
        "258 log-probabilities of the next token",
    )
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "258" in given[f"log-probabilities: POST {path} of OpenAI's form"].reason
    state = given["last state from POST /completion of llama.cpp"]
    assert state.status is Status.RECOVERED
    assert 0 < state.error < 0.1
    layer = given["last layer from POST /completion of llama.cpp"]
    assert (layer.status, layer.known, layer.sought) == (
        Status.RECOVERED,
        1.0,
        "last layer",
    )
    assert layer.reason.split("; ")[1].startswith("width 64: 66 singular values")
    assert layer.error < 1e-5
    assert layer.queries < 110
    assert "logit_bias" in layer.remedy
    assert given["cache files: POST /slots/0 of llama.cpp"].open
    assert proved_without_comparison(audit) == []
    row = rows_of(audit)["last state from POST /completion of llama.cpp"]
    assert (row["exact"], row["share"], row["proved"]) == (None, 0.0, True)
    assert "text, all of it" not in row["why"]
    slot = keyhole.audit(str(weights.parent / "slot.bin"), model=str(weights))
    ids, keys = slot.findings
    assert (ids.attack, keys.attack) == ("WrittenIds", "CachedKeys")
    assert ids.status is keys.status is Status.RECOVERED
    assert slot.exit_code == 1


def test_a_wide_last_layer_is_not_read_to_its_end(weights, monkeypatch):
    monkeypatch.setattr(last_layers, "SAMPLE", 16)
    with tiny_gguf.serving(
        weights
    ) as url:  # 64 questions are too few for its 64 directions
        layer = by_exposure(keyhole.audit(url, budget=64))[LAST_LAYER]
    assert (layer.status, layer.queries) == (Status.BUDGET, 16)
    assert layer.known == pytest.approx(
        16 / 64, abs=2 / 64
    )  # a direction for every answer
    assert f"go on with keyhole extract {url} --method output-layer" in layer.reason
    assert "of 64 that the server states" in layer.reason


def test_many_questions_are_asked_only_where_somebody_wants_it(weights, tmp_path):
    """By name or by a budget, stated before the attack begins; what was answered is kept."""
    said: list[str] = []
    with tiny_gguf.serving(weights) as url:
        probed = keyhole.audit(url, model=str(weights), probe_only=True)
        usual = keyhole.audit(url, answers=tmp_path / "usual.db")
        first, again = (
            keyhole.audit(
                url,
                only="KH-WEIGHTS-LAST-LAYER",
                answers=tmp_path / "a.db",
                notice=said.append,
            )
            for _ in range(2)
        )
    assert {finding.attack for finding in probed.findings} == {"probe"}
    assert {words.skip(skip) for skip in probed.skips} >= {
        "token states: " + EMBEDDINGS
    }
    (skip,) = [skip for skip in usual.skips if words.skip(skip) == LAST_LAYER]
    assert "--budget 1024" in skip.reason
    assert sum(finding.queries for finding in usual.findings) < 10
    assert said[0] == f"{LAST_LAYER}: up to 1,024 questions"
    paid, free = (by_exposure(audit)[LAST_LAYER] for audit in (first, again))
    assert paid.status is free.status is Status.RECOVERED
    assert paid.queries > 64
    assert free.queries <= 8  # that it is the same server is looked at again
    with pytest.raises(InputError, match="exclude each other"):
        keyhole.audit(url, probe_only=True, budget=5)


def test_a_key_closes_llama_cpp(weights, data, monkeypatch):
    with tiny_gguf.serving(weights, "pooling=NONE", "key=secret") as url:
        monkeypatch.delenv("KEYHOLE_API_KEY", raising=False)
        audit = keyhole.audit(url)
        assert {finding.status for finding in audit.findings} == {Status.UNSOLVED}
        assert not any(finding.command for finding in audit.findings)
        assert all(
            "asks for a key (401)" in finding.reason for finding in audit.findings
        )
        assert audit.exit_code == 0
        monkeypatch.setenv("KEYHOLE_API_KEY", "secret")
        monkeypatch.setenv("MY_KEY", "Bearer secret")
        named = EndpointOptions(headers={"Authorization": "MY_KEY"}, rate=1000)
        for endpoint in (None, named):
            options = {
                "model": str(weights),
                "data": data,
                "texts": 1,
                "endpoint": endpoint,
            }
            given = by_exposure(keyhole.audit(url, **options))
            assert (
                given["text from POST /embeddings of llama.cpp"].status
                is Status.RECOVERED
            )
            assert not given["token states: POST /embeddings of llama.cpp"].exposed
            monkeypatch.setenv("KEYHOLE_API_KEY", "another")
        monkeypatch.delenv(
            "KEYHOLE_API_KEY"
        )  # a header is enough for the last layer too
        layer = by_exposure(keyhole.audit(url, budget=16, endpoint=named))[LAST_LAYER]
        assert layer.queries == 16


def test_a_server_of_routes_has_no_tensors():
    with pytest.raises(InputError, match=r"batch is for endpoints with tensors"):
        keyhole.audit("http://127.0.0.1:9", endpoint=EndpointOptions(batch=3))


def test_a_pooled_vector_is_not_judged_here(weights):
    with tiny_gguf.serving(weights, "pooling=MEAN") as url:
        audit = keyhole.audit(url)
    vector = by_exposure(audit)["embedding: POST /v1/embeddings of OpenAI's form"]
    assert vector.status is Status.EXPOSED
    assert (
        vector.command
        == f"keyhole audit {url}/v1/embeddings --model MODEL --known FILE"
    )
    (states,) = [
        skip for skip in audit.skips if words.skip(skip).startswith("token states")
    ]
    assert states.reason == "not given: no token states in the answer"


@contextmanager
def standing_in(answers, owner):
    """No real server: one that answers each route as the documentation of `owner` says it does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(
                {"data": [{"id": "tiny", "owned_by": owner}]}
                if "models" in self.path
                else None
            )

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(answers[self.path](content) if self.path in answers else 404)

        def reply(self, answer):
            body = json.dumps(
                {"error": answer} if isinstance(answer, int) else answer
            ).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def states_of(box, text):
    ids = torch.tensor([box.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return box.model(ids).last_hidden_state[0]


def test_states_of_a_stand_in_for_vllm(tmp_path):
    """As vLLM answers: POST /pooling with token_embed gives rows of length one, outside of /v1."""
    tiny.save("bert", tmp_path / "model")
    box = keyhole.models.load_model(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("w1 w20 w3 w4\n")

    def pooling(content):
        assert (content["model"], content["task"]) == ("tiny", "token_embed")
        rows = torch.nn.functional.normalize(states_of(box, content["input"]), dim=-1)
        return {
            "object": "list",
            "data": [{"index": 0, "object": "pooling", "data": rows.tolist()}],
        }

    with standing_in({"/pooling": pooling}, "vllm") as url:
        audit = keyhole.audit(
            url, model=str(tmp_path / "model"), data=tmp_path / "texts.txt"
        )
    given = by_exposure(audit)
    assert given["token states: POST /pooling of vLLM"].exposed
    assert given["text from POST /pooling of vLLM"].status is Status.RECOVERED
    assert (
        "does not guard this route"
        in given["token states: POST /pooling of vLLM"].remedy
    )


@pytest.mark.parametrize(
    ("status", "unchecked"), [(400, False), (404, False), (500, True)]
)
def test_a_fault_of_a_server_is_not_a_closed_route(status, unchecked):
    with standing_in({"/pooling": lambda _: status}, "vllm") as url:
        audit = keyhole.audit(url, probe_only=True)
    named = [
        skip for skip in audit.skips if skip.exposure.name.startswith("POST /pooling")
    ]
    assert {(skip.unchecked, skip.absent) for skip in named} == {
        (unchecked, not unchecked)
    }


@pytest.mark.parametrize(
    "texts", ["w1 w20 w3 w4\nw9 w9 w8\nw7\n", "w9 w9 w8\nw7\nw1 w20 w3 w4\n"]
)
def test_a_text_that_is_read_counts_whatever_happens_to_others(texts, tmp_path):
    """One text is read, one is answered with random numbers, one is refused: in any order."""
    tiny.save("bert", tmp_path / "model")
    box = keyhole.models.load_model(tmp_path / "model")
    (tmp_path / "texts.txt").write_text(texts)

    def pooling(content):
        if content["input"] == "w7":
            return 400
        rows = states_of(box, content["input"])
        if content["input"].startswith("w9"):
            rows = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
        rows = torch.nn.functional.normalize(rows, dim=-1)
        return {"data": [{"index": 0, "object": "pooling", "data": rows.tolist()}]}

    with standing_in({"/pooling": pooling}, "vllm") as url:
        audit = keyhole.audit(
            url, model=str(tmp_path / "model"), data=tmp_path / "texts.txt"
        )
    found = by_exposure(audit)["text from POST /pooling of vLLM"]
    assert found.status is Status.INEXACT
    assert found.reason.startswith("1 of 2 texts exact and verified")
    assert "refused for 1 other text" in found.reason


def test_chosen_tokens_of_a_stand_in_for_vllm(tmp_path):
    """As vLLM answers: 20 of the likeliest at most, and any tokens that a request names."""
    tiny.save("llama", tmp_path / "model", head="AutoModelForCausalLM")
    box = keyhole.models.load_model(tmp_path / "model", task="causal")

    def completions(content):
        chosen = content.get("logprob_token_ids", [])
        if (
            "prompt" not in content
            or content["logprobs"] not in range(21)
            or len(chosen) > 128
        ):
            return 400
        if max(chosen, default=0) >= len(own := following_text(box, content["prompt"])):
            return 400
        best = own.topk(content["logprobs"]).indices.tolist()
        tops = {f"token_id:{token}": float(own[token]) for token in chosen or best}
        return {"choices": [{"logprobs": {"top_logprobs": [tops]}}]}

    with standing_in({"/v1/completions": completions}, "vllm") as url:
        given = by_exposure(keyhole.audit(url, model=str(tmp_path / "model")))
        with closing(Completions.at(url)) as server:
            assert server.vocabulary == box.model.config.vocab_size
    capped = given["log-probabilities: POST /v1/completions of vLLM"]
    assert (capped.status, capped.queries > 0) == (Status.EXPOSED, True)
    assert "past the cap" in capped.reason
    state = given["last state from POST /v1/completions of vLLM"]
    assert (state.status, state.error < 1e-3) == (Status.RECOVERED, True)


@pytest.mark.parametrize("status", [401, 403, 413, 422])
def test_only_a_bad_request_shows_where_a_vocabulary_ends(status):
    def completions(content):
        return {"choices": []} if max(content["logprob_token_ids"]) < 100 else status

    with (
        standing_in({"/v1/completions": completions}, "vllm") as url,
        closing(Completions.at(url)) as server,
    ):
        assert server.vocabulary is None


def following_text(box, prompt):
    ids = box.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    with torch.no_grad():
        return box.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (SAFE, "1,000 log-prob"),
        (100, "768 log-probabilities of the next token, of tokens named"),
    ],
)
def test_a_stand_in_for_sglang_is_not_asked_for_more_than_it_has(cap, expected):
    """As SGLang 0.5.23 answers: triples, of the likeliest tokens and of those that are
    named. Asked for more log-probabilities than it has tokens it ends.
    """

    def generate(content):
        assert content["sampling_params"]["max_new_tokens"] == 1
        if content.get("return_hidden_states"):
            return {"text": "", "meta_info": {"hidden_states": [[[0.5] * 8] * 3]}}
        assert content["top_logprobs_num"] <= SAFE
        given = {
            "output_top_logprobs": [
                triples(range(min(content["top_logprobs_num"], cap)))
            ]
        }
        if "token_ids_logprob" in content:
            given["output_token_ids_logprobs"] = [triples(content["token_ids_logprob"])]
        return {"text": "", "meta_info": given}

    def triples(tokens):
        return [[-1.0 - token, token, None] for token in tokens]

    def completions(content):
        assert content["logprobs"] <= SAFE
        return {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0}]}}]}

    with standing_in(
        {"/generate": generate, "/v1/completions": completions}, "sglang"
    ) as url:
        given = by_exposure(keyhole.audit(url))
        with pytest.raises(
            InputError, match="a server of SGLang, which crashes if asked"
        ):
            Completions.at(url)
    states = given["token states: POST /generate of SGLang"]
    assert "3 rows of 8 numbers" in states.reason
    assert states.command == f"keyhole audit {url} --model MODEL"
    assert words.outcome(states) == "open, not tried"
    listed = given["log-probabilities: POST /v1/completions of OpenAI's form"]
    assert not listed.command.startswith("keyhole extract")
    assert expected in given["log-probabilities: POST /generate of SGLang"].reason


def test_few_log_probabilities_are_kept():
    """OpenAI: five at most, by the text of their tokens; more are refused."""
    asked = []

    def completions(content):
        asked.append(content["logprobs"])
        if content["logprobs"] not in range(6):
            return 400
        return {"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -2.0}]}}]}

    with standing_in({"/v1/completions": completions}, "openai") as url:
        audit = keyhole.audit(url)
    assert asked[0] == SAFE  # more might end a server of a kind that is not known
    assert asked[-1] == 5
    kept = by_exposure(audit)[
        "log-probabilities: POST /v1/completions of OpenAI's form"
    ]
    assert kept.status is Status.NOT_IDENTIFIABLE
    assert not audit.exposed


def vllm_answer(model):
    """What vLLM documents: a tensor of torch.save in base64, and tokens by their text."""

    def completions(content):
        if "prompt_embeds" not in content:
            return 400
        data = io.BytesIO(base64.b64decode(content["prompt_embeds"]))
        best = following(
            model, torch.load(data, weights_only=True), content["logprobs"]
        )
        tops = {f"t{token}": value for value, token in best}
        return {"choices": [{"logprobs": {"top_logprobs": [tops]}}]}

    return {"/v1/completions": completions}


def sglang_answer(model):
    """What SGLang documents: lists of numbers, and triples."""

    def generate(content):
        if "input_embeds" not in content:
            return 400
        rows = torch.tensor(content["input_embeds"])
        best = following(model, rows, content["top_logprobs_num"])
        return {
            "meta_info": {
                "output_top_logprobs": [[[value, t, ""] for value, t in best]]
            }
        }

    return {"/generate": generate}


def following(model, rows, count):
    with torch.no_grad():
        scores = model(inputs_embeds=rows[None]).logits[0, -1].log_softmax(-1)
    best = scores.topk(count)
    return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))


@pytest.mark.parametrize(
    ("owner", "path", "answers"),
    [
        ("vllm", "/v1/completions of vLLM", vllm_answer),
        ("sglang", "/generate of SGLang", sglang_answer),
    ],
)
def test_prompts_of_vectors_for_stand_ins(owner, path, answers, tmp_path):
    tiny.save("llama", tmp_path / "model", head="AutoModelForCausalLM")
    box = keyhole.models.load_model(tmp_path / "model", task="causal")
    other = tiny.language_model("llama", seed=5)
    exposure = f"prompts of vectors: POST {path}"
    with standing_in(answers(box.model), owner) as url:
        audit = keyhole.audit(url, model=str(tmp_path / "model"))
        oracle = VectorPrompts(Server.at(url), box.model.config.hidden_size)
        rows = torch.randn(2, 3, oracle.dim, dtype=torch.float64)
        given = oracle(rows)
        oracle.close()
    finding = by_exposure(audit)[exposure]
    assert finding.status is Status.EXPOSED
    assert finding.error < 1e-5
    for answer, sequence in zip(given, rows, strict=True):
        best = [value for value, _ in following(box.model, sequence.float(), 5)]
        assert answer.tolist() == pytest.approx(best, abs=1e-5)
    with standing_in(answers(other), owner) as url:
        audit = keyhole.audit(url, model=str(tmp_path / "model"))
    assert by_exposure(audit)[exposure].status is Status.MISMATCH
    with standing_in({}, owner) as url:
        audit = keyhole.audit(url, model=str(tmp_path / "model"))
    (skip,) = [skip for skip in audit.skips if words.skip(skip) == exposure]
    assert skip.reason == "not taken: 404"


def test_who_may_be_probed(monkeypatch):
    for name in (
        "http://example.org",
        "http://10.0.0.1:8080/",
        "http://[2001:db8::1]:80",
    ):
        with pytest.raises(InputError, match="is another machine: give --authorized"):
            keyhole.audit(name)
    with standing_in({}, "llamacpp") as url:
        by_name = url.replace("127.0.0.1", "localhost")
        assert Server.at(by_name).kind == "llama.cpp"
    with pytest.raises(OracleError, match="no answer from"):
        keyhole.audit(url)  # gone


def test_every_route_has_a_setting_that_closes_it():
    assert len({(route.name, route.gives) for route in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        assert "--" in route.remedy
        assert "$text" in json.dumps(route.content) or route.enabled
        assert route.asked("words", "name") != dict(route.content) or route.enabled
