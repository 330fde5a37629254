"""The assertion: what comes back fails it, what could not be checked is never a pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import made_stores
import tiny_classifiers
import tiny_models as tiny
from exposures import called, names
from keyhole import oracle
from keyhole.audit import StoreTarget
from keyhole.audit.one_exposure import NAMES
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.models.loading import identity
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.stores import open_store
from keyhole.testing import CouldNotCheck, assert_withstands
from keyhole.testing.withstands import line

TEXTS = ["w1 w2 w3 w4 w5", "w9 w8 w7"]
WORDS = tiny.tokenizer()


@pytest.fixture(scope="module")
def encoder():
    return tiny.model("bert")


@pytest.fixture(scope="module")
def classifier():
    return tiny_classifiers.model(labels=2)


@pytest.mark.parametrize(
    ("exposure", "attack"),
    [
        ("hidden:3", "hidden states of layer 3 (EncoderStates)"),
        ("kv:2", "keys and values of layer 2 (CachedKeys)"),
        ("maps:1", "attention maps of layer 1 (EncoderMaps)"),
    ],
)
def test_a_leak_of_a_model_fails_with_one_line_for_each_finding(
    encoder, exposure, attack
):
    with pytest.raises(AssertionError) as failed:
        assert_withstands(encoder, exposure, TEXTS, tokenizer=WORDS)
    (line,) = str(failed.value).splitlines()
    assert line.startswith(
        f"{attack}: recovered, 2 texts, such as “w1 w2 w3 w4 w5”. Fix: "
    )


def test_a_causal_model_and_its_logits(tmp_path):
    model = tiny.language_model("gpt2")
    words = tiny.tokenizer(causal=True)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w1 w2\nw2 w3\nw4 w3\n")
    for exposure in ("hidden:2", "kv:0", "logits"):
        with pytest.raises(
            AssertionError, match=r": recovered, 1 text, such as “w1 w2 w3”"
        ):
            assert_withstands(
                model, exposure, "w1 w2 w3", tokenizer=words, corpus=corpus
            )


def test_what_a_test_allows_passes(encoder):
    audit = assert_withstands(encoder, "hidden:3", TEXTS, tokenizer=WORDS, at_most=1.0)
    assert names(audit.findings) == ["hidden states of layer 3"]
    assert audit.exposed == 1  # allowed, and still said


def test_what_is_kept_passes():
    """A budget below the number of unknowns keeps the weights."""
    audit = assert_withstands(oracle.plant(dim=6, seed=1), "scores", budget=20)
    assert audit.exit_code == 0
    assert {finding.queries for finding in audit.findings} == {20}


def test_scores_of_an_endpoint():
    head = oracle.plant(dim=6, seed=1)
    with pytest.raises(AssertionError) as failed:
        assert_withstands(head, "scores")
    lines = str(failed.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "full scores (SingleHead)",
        "full scores, low-rank head (LowRank)",
    ]
    assert all(": recovered, 42 queries. Fix: " in line for line in lines)


def test_an_endpoint_that_does_not_answer_could_not_be_checked():
    class Silent:
        dim = 4

        def __call__(self, sequences):
            raise oracle.OracleError("no answer today")

    with pytest.raises(CouldNotCheck, match=r"could not check: .*no answer today"):
        assert_withstands(Silent(), "scores")
    with pytest.raises(CouldNotCheck, match="budget of 5 queries is spent"):
        assert_withstands(oracle.Counted(oracle.plant(dim=4), budget=5), "scores")


def test_flips(classifier):
    examples = [(each.text, each.label) for each in tiny_classifiers.examples(4)]
    with pytest.raises(AssertionError) as failed:
        assert_withstands(
            classifier, "flips", examples=examples, tokenizer=WORDS, share=0.2
        )
    lines = str(failed.value).splitlines()
    assert lines[0].startswith(
        "20% of each head's attention cut (HackAttend): 2 of 2 flipped (100%), "
    )
    assert ". Fix: Take no attention masks" in lines[0]
    assert not any("random" in line for line in lines)  # the control is no finding


def test_the_gradient_of_a_batch(classifier):
    with pytest.raises(
        AssertionError, match=r"gradient of a batch .*: recovered, 1 update"
    ):
        assert_withstands(classifier, "gradient", TEXTS, tokenizer=WORDS)


@pytest.mark.parametrize("exposure", ["gradient", "flips"])
def test_a_model_without_the_head_for_it_could_not_be_checked(encoder, exposure):
    with pytest.raises(CouldNotCheck, match="could not check"):
        assert_withstands(encoder, exposure, TEXTS, tokenizer=WORDS)


def test_a_store(tmp_path):
    """Given as an opened store, or by its name with the encoder that made its vectors."""
    model = tiny.model("bert", num_hidden_layers=1)
    loaded = tiny.loaded(model, name="a tiny encoder")
    texts = ["w1", "w20"]
    vectors = embeddings(model, WORDS, texts, Exposure("pooled")).float().numpy()
    name = made_stores.jsonl(tmp_path, vectors, texts)
    with open_store(name) as store:
        target = StoreTarget.of(store, loaded, texts=2)
    target = replace(
        target, method=CountedReader(texts, max_length=1, search=SumSearch(passes=100))
    )
    with pytest.raises(
        AssertionError, match=r"stored embedding \(CountedReader\): 2 of 2 texts"
    ):
        assert_withstands(target, "pooled")
    with pytest.raises(InputError, match="makes vectors of"):
        assert_withstands(name, "pooled", model="demo", sample=2)
    with pytest.raises(InputError, match=r"the vector store .* needs --model"):
        assert_withstands(name, "pooled")


def test_a_model_is_given_back_as_it_was(classifier):
    assert classifier.training
    random = torch.get_rng_state()
    before = identity(classifier, head=True)
    frozen = next(classifier.parameters()).requires_grad_(False)
    with pytest.raises(AssertionError):
        assert_withstands(classifier, "hidden:1", TEXTS, tokenizer=WORDS)
    assert all(part.training for part in classifier.modules())
    assert [weight.requires_grad for weight in classifier.parameters()].count(
        False
    ) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert identity(classifier, head=True) == before
    frozen.requires_grad_(True)


def test_a_model_in_half_precision_is_copied(encoder):
    half = copy.deepcopy(encoder).to(torch.bfloat16)
    with pytest.raises(AssertionError, match=": recovered"):
        assert_withstands(half, "hidden:1", TEXTS, tokenizer=WORDS)
    assert next(half.parameters()).dtype is torch.bfloat16


def test_a_folder_a_loaded_model_and_a_file_of_texts(tmp_path, encoder):
    tiny.save("bert", tmp_path / "model")
    (tmp_path / "texts.txt").write_text("w1 w2 w3\n")
    loaded = tiny.loaded(encoder, name="mine")
    for target in (tmp_path / "model", loaded):
        with pytest.raises(AssertionError, match="recovered, 1 text, such as"):
            assert_withstands(target, "hidden:1", tmp_path / "texts.txt")


WRONG = [
    (lambda: assert_withstands("demo", "scars"), "there is no exposure scars: give"),
    (
        lambda: assert_withstands(tiny.model("bert"), "hidden:1", TEXTS),
        "needs tokenizer=",
    ),
    (lambda: assert_withstands(print, "scores"), "a callable with .dim"),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "hidden:1"),
        "hidden:1 needs a model",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", TEXTS),
        "texts are for a model",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", at_most=2),
        "at_most must be from",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", share=0.1),
        "share is for flips",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", budget=0),
        "budget must be 1 or",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", tokenizer=1),
        "a tokenizer goes",
    ),
    (
        lambda: assert_withstands(oracle.plant(dim=3), "scores", precision="fp4"),
        "a precision must",
    ),
    (
        lambda: assert_withstands("demo", "hidden:1", examples=["w"]),
        "examples are for flips",
    ),
    (lambda: assert_withstands("demo", "hidden:1", []), "expected a list of texts"),
    (lambda: assert_withstands("demo", "hidden:1", budget=3), "budget is for scores"),
]


@pytest.mark.parametrize(
    ("call", "message"), WRONG, ids=[message for _, message in WRONG]
)
def test_wrong_input_is_neither_a_pass_nor_a_finding(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_names_are_those_of_capture_and_two_more():
    assert NAMES == (
        "hidden",
        "kv",
        "maps",
        "attention",
        "pooled",
        "logits",
        "gradient",
        "scores",
        "flips",
    )


def test_hostile_words_stay_in_one_line(encoder):
    audit = assert_withstands(encoder, "hidden:1", TEXTS, tokenizer=WORDS, at_most=1)
    bad = replace(audit.findings[0], exposure=called("a\nb\x1b[31m\u202ec", "\x07"))
    assert line(bad).isprintable()
