"""The last layer from logits: planted matrices, a naive witness, and what stays unknown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_logits import WIDTH, WORDS, PlantedLogits

from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import OutputLayer, Status
from keyhole.extract.output_layer import distance
from keyhole.models import load_model
from keyhole.models.next_token import NextTokenLogits
from keyhole.oracle.token_questions import ABSENT, Logits, parts_of
from tiny_models import language_model, save, tokenizer


def naive_rank(target, count, centred, affine=False):
    """Gaussian elimination with full pivoting, one prompt and one token at a time."""
    prompts = torch.randint(
        WORDS, (count, 4), generator=torch.Generator().manual_seed(99)
    )
    rows = [target(prompt[None])[0].numpy() for prompt in prompts]
    rows = [row - row.mean() if centred else row for row in rows]
    if affine:
        rows = [row - rows[0] for row in rows[1:]]
    rank = 0
    largest = max(np.abs(row).max() for row in rows)
    while rows:
        sizes = [np.abs(row).max() for row in rows]
        if max(sizes) <= 1e-9 * largest:
            return rank
        pivot = rows.pop(int(np.argmax(sizes)))
        place = int(np.abs(pivot).argmax())
        rows = [row - row[place] / pivot[place] * pivot for row in rows]
        rank += 1
    return rank


CASES = [
    (norm, bias, logarithms)
    for norm in ("rms", "layer", "layer, biased")
    for bias in (False, True)
    for logarithms in (True, False)
]


@pytest.mark.parametrize(("norm", "bias", "logarithms"), CASES)
def test_the_width_and_the_matrix(norm, bias, logarithms):
    target = PlantedLogits(norm, bias, logarithms)
    result = OutputLayer()(target)
    layer = result.layer
    assert (result.status, result.width) == (Status.RECOVERED, WIDTH)
    assert layer.rank == naive_rank(target, WIDTH + 8, logarithms)
    assert layer.rank - layer.constant == naive_rank(
        target, WIDTH + 8, logarithms, affine=True
    )
    assert layer.log_probabilities == logarithms
    assert result.queries <= WIDTH + 24
    assert result.check.worst < 1e-12
    if not (norm.startswith("layer") and (bias or norm == "layer")):
        # Behind a LayerNorm one direction of W is never asked for, or hides in the
        # output bias.
        assert distance(result.model, target.W, centred=logarithms)[1] < 1e-12


def test_the_matrix_is_that_of_least_squares():
    """Every column of the true matrix is a combination of ours and the row that all share."""
    target = PlantedLogits()
    W = OutputLayer()(target).model.W
    known = np.concatenate([W.numpy(), np.ones((WORDS, 1))], 1)
    for column in target.W.T.numpy():
        solved = np.linalg.lstsq(known, column, rcond=None)[0]
        assert np.abs(known @ solved - column).max() < 1e-12


def test_a_tied_table_is_known_up_to_a_metric_and_not_beyond():
    """Another table with the same answers: its whitened Gram matrix agrees, its cosines do not."""
    target = PlantedLogits()
    draw = torch.Generator().manual_seed(1)
    A = torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    other = target.W @ A
    centre = torch.randn(WIDTH, generator=draw, dtype=torch.float64)
    ids = torch.randint(WORDS, (6, 4), generator=draw)
    states = torch.linalg.solve(A, target.states(ids).T).T
    same = (states @ (other + centre).T).log_softmax(1)
    assert torch.allclose(same, target(ids), rtol=0, atol=1e-11)

    def whitened(table):
        table = table - table.mean(0)
        return table @ torch.linalg.solve(table.T @ table, table.T)

    stolen = OutputLayer()(target).model.W
    assert torch.allclose(stolen @ stolen.T, whitened(target.W), rtol=0, atol=1e-12)
    assert torch.allclose(
        whitened(other + centre), whitened(target.W), rtol=0, atol=1e-11
    )
    cosines = [
        torch.nn.functional.normalize(table) @ torch.nn.functional.normalize(table).T
        for table in (target.W, other + centre)
    ]
    assert float((cosines[0] - cosines[1]).abs().max()) > 0.5


def test_too_few_answers_give_no_width():
    result = extract.run(Logits(PlantedLogits()), OutputLayer(), budget=WIDTH)
    assert (result.status, result.width) == (Status.BUDGET, None)
    assert (
        result.layer.rank == WIDTH
    )  # a direction from every answer, and no end in sight
    assert "24 directions or more" in result.reason
    assert result.model.W.shape == (WORDS, WIDTH)


def test_a_budget_for_the_attack_alone():
    result = extract.run(Logits(PlantedLogits()), OutputLayer(), budget=40)
    assert (result.status, result.width) == (Status.UNVERIFIED, WIDTH)


def test_logits_that_are_bent_have_no_width():
    """A soft cap makes answers of any rank: nothing is claimed."""
    result = OutputLayer(most=200)(PlantedLogits(cap=2.0))
    assert (result.status, result.width) == (Status.UNSOLVED, None)
    assert "no cliff" in result.reason


def test_a_vocabulary_no_larger_than_the_width():
    result = OutputLayer()(PlantedLogits(words=20))
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "no larger than the width" in result.reason


def test_answers_that_are_all_the_same():
    constant = torch.linspace(-3, 3, WORDS, dtype=torch.float64).log_softmax(0)
    result = OutputLayer()(lambda ids: constant.expand(len(ids), -1))
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "do not depend on the prompt" in result.reason


@pytest.mark.parametrize("decimals", [1, 2, 3, 6])
def test_rounded_answers(decimals):
    target = PlantedLogits()
    result = OutputLayer()(oracle.Rounded(Logits(target), decimals))
    assert (result.width, result.layer.decimals) == (WIDTH, decimals)
    assert result.status is (Status.RECOVERED if decimals == 6 else Status.INEXACT)
    error = distance(result.model, target.W, centred=True)[1]
    assert 0.01 * 10.0**-decimals < error < 0.2 * 10.0**-decimals


def test_answers_of_whole_numbers():
    """Rounding may hide directions; then the width is not claimed, or found with more answers."""
    result = OutputLayer()(oracle.Rounded(Logits(PlantedLogits()), 0))
    assert result.layer is None or result.width in (None, WIDTH)


def test_chosen_tokens():
    """Seven a question, and one: a function in this process stands for a server with a bias."""
    target = PlantedLogits(words=70, width=4)
    for top, tokens in ((1, None), (7, 70)):
        result = OutputLayer(top=top, tokens=tokens)(target)
        assert (result.status, result.width) == (Status.RECOVERED, 4)
        assert result.layer.tokens == len(result.model.tokens) >= (tokens or 64)
        assert distance(result.model, target.W, centred=True)[1] < 1e-12
    assert sorted(result.model.tokens.tolist()) == list(range(70))


def test_models_in_this_process(tmp_path):
    for family, constant in (("llama", False), ("gpt2", True)):
        model = language_model(family)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if name.endswith("ln_f.bias"):
                    weights.normal_(generator=torch.Generator().manual_seed(1))
        folder = tmp_path / family
        model.save_pretrained(folder)
        tokenizer(causal=True).save_pretrained(folder)
        result = extract.run(str(folder), reference=folder)
        assert (result.status, result.width) == (Status.RECOVERED, 32)
        assert (result.layer.constant, result.layer.log_probabilities) == (
            constant,
            False,
        )
        assert result.layer.relative < 1e-5
        assert result.layer.tied == (family == "gpt2")


def test_a_model_is_named_in_a_ledger(tmp_path):
    save("llama", tmp_path / "model", head="AutoModelForCausalLM")
    loaded = load_model(tmp_path / "model", task="causal")
    logits = NextTokenLogits(loaded)
    assert loaded.identity in Logits(logits).identity
    assert logits(torch.tensor([[5, 6, 7]])).shape == (1, 200)


def test_it_is_saved_and_comes_back(tmp_path):
    result = OutputLayer()(PlantedLogits("layer, biased"))
    result.save(tmp_path / "layer.json")
    again = extract.Extraction.load(tmp_path / "layer.json")
    assert again.layer == result.layer
    assert torch.equal(again.model.W, result.model.W)
    assert (again.model.width, again.model.constant) == (WIDTH, True)
    states = torch.randn(2, 3, again.model.dim, dtype=torch.float64)
    assert torch.equal(again.model(states), states[:, -1] @ result.model.W.T)
    assert f"width {WIDTH}" in again.summary()


def test_no_prompt_is_asked_twice():
    """Two equal answers fall off a cliff of their own: 40 single tokens, of which 24 are asked."""
    target = PlantedLogits(words=40, width=8)
    result = OutputLayer(length=1)(lambda ids: target(ids.expand(-1, 4)))
    asked = [tuple(ids) for ids in target.asked[1 : result.queries]]
    assert (result.width, len(set(asked))) == (8, len(asked))


def test_the_width_from_which_token_is_sampled():
    target = PlantedLogits(width=6)
    result = OutputLayer(top=0)(target)
    assert (result.status, result.width) == (Status.RECOVERED, 6)
    assert distance(result.model, target.W, centred=True)[1] < 1e-4


class Shares:
    """Probabilities after the bias, as servers give them: those below float32 are zero."""

    dim = 2

    def __init__(self, function, words):
        self.function = function
        self.vocabulary = words

    def __call__(self, sequences):
        return torch.stack([self._one(rows) for rows in sequences])

    def _one(self, rows):
        prompt, raised, biases = parts_of(rows)
        logits = self.function(prompt[None])[0].clone()
        logits[raised] += biases
        shares = logits.softmax(0)[raised].float().double()
        return torch.where(shares > 0, shares.log() - biases, ABSENT)


def test_tokens_of_no_probability_next_to_the_reference():
    target = PlantedLogits(width=4, words=100, logarithms=False)
    result = OutputLayer(top=5)(Shares(lambda ids: 6 * target(ids), 100))
    assert result.width == 4, result.reason


def test_a_row_goes_on_with_the_prompt_it_is_of():
    """Of some tokens a prompt shows nothing: another takes its place, for later tokens as well."""
    target = PlantedLogits(width=40, words=300, logarithms=False)

    class Silent(Shares):
        def _one(self, rows):
            prompt, raised, _ = parts_of(rows)
            return torch.where(
                (prompt.sum() + raised) % 500 == 0, ABSENT, super()._one(rows)
            )

    result = OutputLayer(top=20)(Silent(target, 300))
    assert result.width == 40, result.reason


def test_a_prompt_that_hides_the_reference_is_not_used():
    target = PlantedLogits(width=8, words=100, logarithms=False)

    class NoReference(Shares):
        def _one(self, rows):
            prompt, raised, _ = parts_of(rows)
            hidden = (torch.arange(len(raised)) == 0) & (prompt.sum() % 3 == 0)
            return super()._one(rows).where(~hidden, ABSENT)

    result = OutputLayer(top=5)(NoReference(target, 100))
    assert result.width == 8, result.reason


@pytest.mark.parametrize(
    ("norm", "logarithms"),
    [
        ("rms", True),
        ("rms", False),
        ("layer, biased", True),
        ("layer", False),
    ],
)
def test_up_to_a_rotation(norm, logarithms):
    """All inner products of rows are known, which an invertible map would change."""
    target = PlantedLogits(norm, logarithms=logarithms, width=10)
    result = OutputLayer(rotation=True)(target)
    model = result.model
    W = target.W
    assert (result.status, result.width, model.rotated) == (Status.RECOVERED, 10, True)
    if norm != "rms":
        W = W - W.mean(1, keepdim=True)
    W = W - W.mean(0) if logarithms else W
    found = model.W[:, : model.dim - model.constant]
    assert torch.allclose(found @ found.T, W @ W.T, rtol=0, atol=1e-3)
    assert "up to a rotation" in result.reason


def test_where_there_is_no_rotation_to_be_had():
    target = PlantedLogits(width=10)
    linear = OutputLayer(rotation=True)(
        lambda ids: target.table[ids].flatten(1)[:, :9] @ target.W.T[:9]
    )
    assert not linear.model.rotated
    assert "no one ellipsoid" in linear.reason
    wide = OutputLayer(rotation=True, most=60)(target)
    assert "a rotation takes" in wide.reason


def test_wrong_input(tmp_path):
    with pytest.raises(InputError, match="output-layer reads a language model"):
        extract.run("demo", "output-layer")
    with pytest.raises(
        InputError, match="a reference is for output-layer, not for low-rank"
    ):
        extract.run("demo", "low-rank", reference=tmp_path)
    with pytest.raises(InputError, match="tokens needs top"):
        OutputLayer(tokens=3)
    with pytest.raises(InputError, match="top must be 0 or more, not -1"):
        OutputLayer(top=-1)
    with pytest.raises(InputError, match="is another machine: give --authorized"):
        extract.run("http://example.org", "output-layer")
    result = OutputLayer()(oracle.plant(dim=3))
    assert result.status is Status.NOT_APPLICABLE
