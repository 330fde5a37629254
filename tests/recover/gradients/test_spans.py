"""The span of inputs from a gradient, against naive loops and against the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
import tiny_models as tiny
from keyhole.models.capture import Exposure, capture
from keyhole.models.hooks import hooks
from keyhole.recover.attack import Target
from keyhole.recover.gradients.span import first_inputs, joined, span_of
from keyhole.recover.gradients.text_search import contexts_of


def target_of(family, head="AutoModel"):
    return Target.of(
        tiny.model(family, head=head), tiny.tokenizer(family in tiny.DECODERS)
    )


@pytest.mark.parametrize("family", [*tiny.ENCODERS, *tiny.DECODERS])
def test_the_first_inputs_are_the_model_s_own(family):
    target = target_of(family)
    ids = tiny.ids(20, 12, causal=family in tiny.DECODERS)
    given = capture(target.model, Exposure("hidden", 0), ids=ids)["values"]
    norm = target.parts.opening_norm(1)
    given = given if norm is None else norm(given)
    inputs = first_inputs(target.parts, 12)
    for place in range(12):
        own = inputs.at(ids[:, place], 0 if inputs.places is None else place)
        assert torch.allclose(own, given[:, place].double(), atol=2e-6)


def test_inputs_lie_in_the_span_and_others_do_not():
    stream = np.random.default_rng(0)
    inputs = stream.normal(size=(7, 20))
    others = stream.normal(size=(5, 20))
    rows = reference.gradient_of_map(stream.normal(size=(7, 30)), inputs)
    span = span_of(torch.tensor(rows), torch.zeros(30, 20))
    assert span.rank == 7
    assert span.complete
    assert float(span.distance(torch.tensor(inputs)).max()) < 1e-12
    naive = [reference.distance_from_rows(row, inputs) for row in others]
    assert np.allclose(span.distance(torch.tensor(others)), naive, atol=1e-12)


def test_the_span_of_as_many_inputs_as_its_width_is_not_complete():
    stream = np.random.default_rng(0)
    rows = reference.gradient_of_map(
        stream.normal(size=(25, 30)), stream.normal(size=(25, 20))
    )
    assert not span_of(torch.tensor(rows), torch.zeros(30, 20)).complete


def test_noise_is_not_part_of_the_span():
    stream = np.random.default_rng(0)
    rows = reference.gradient_of_map(
        stream.normal(size=(7, 90)), stream.normal(size=(7, 60))
    )
    noisy = rows + 0.01 * stream.normal(size=rows.shape)
    assert span_of(torch.tensor(noisy), torch.full((90, 60), 1e-4)).rank == 7
    assert span_of(torch.tensor(noisy), torch.zeros(90, 60)).rank == 60


def test_inputs_are_nearer_to_a_noisy_span_than_others():
    stream = np.random.default_rng(0)
    inputs = stream.normal(size=(7, 60))
    others = stream.normal(size=(50, 60))
    rows = reference.gradient_of_map(stream.normal(size=(7, 90)), inputs)
    span = span_of(
        torch.tensor(rows + 2 * stream.normal(size=rows.shape)),
        torch.full((90, 60), 4.0),
    )
    near, far = (span.distance(torch.tensor(each)) for each in (inputs, others))
    assert float(near.max()) < float(far.min())


def test_the_span_from_adapters():
    """B's gradient G·Aᵀ holds the inputs after A; a map that misses an input is left out."""
    stream = np.random.default_rng(0)
    inputs = stream.normal(size=(5, 20))
    others = stream.normal(size=(9, 20))
    spans = []
    for seen in (5, 5, 4):
        through = stream.normal(size=(8, 20))
        rows = reference.gradient_of_map(
            stream.normal(size=(seen, 30)), inputs[:seen] @ through.T
        )
        spans.append(
            (span_of(torch.tensor(rows), torch.zeros(30, 8)), torch.tensor(through))
        )
    span = joined(spans)
    assert (span.rank, span.rest.shape[1], span.complete) == (5, 6, True)
    assert float(span.distance(torch.tensor(inputs)).max()) < 1e-9
    assert float(span.distance(torch.tensor(others)).min()) > 0.1


def test_contexts_are_the_attention_s_own_and_changes_are_whole_texts():
    target = target_of("bert")
    text = tiny.ids(1, 9)[0]
    parts = target.parts
    tokens = torch.arange(2, 60)
    tokens = torch.cat([tokens, text]).unique()
    directions = torch.randn(32, 5, generator=torch.Generator().manual_seed(0)).double()
    contexts = contexts_of(parts, first_inputs(parts, 9), tokens, 9, directions)
    taken = []

    def take(_module, args):
        taken.append(args[0][0])

    with hooks((parts.attentions[0].output.register_forward_pre_hook, take)):
        target.model(input_ids=text[None])
    numbers = torch.searchsorted(tokens, text)
    far = (taken[0].double() @ directions).square().sum(-1).mean()
    ratio = float(contexts.misfit(numbers)) / float(
        far
    )  # in units of a typical value's length
    changed = contexts.changed(numbers, 4, torch.arange(len(tokens)))
    for number in (0, 7, 31):
        other = numbers.clone()
        other[4] = number
        assert float(changed[number]) == pytest.approx(
            float(contexts.misfit(other)), rel=1e-4
        )
        with hooks((parts.attentions[0].output.register_forward_pre_hook, take)):
            target.model(input_ids=tokens[other][None])
        far = float((taken[-1].double() @ directions).square().sum(-1).mean())
        assert float(changed[number]) == pytest.approx(ratio * far, rel=1e-3)


def test_masses_put_all_tokens_of_a_text_in_their_places():
    target = target_of("bert")
    text = tiny.ids(1, 9)[0]
    parts = target.parts
    tokens = text.unique()
    taken = []

    def take(_module, args):
        taken.append(args[0][0].double())

    with hooks((parts.attentions[0].output.register_forward_pre_hook, take)):
        target.model(input_ids=text[None])
    span = span_of(taken[0], torch.zeros_like(taken[0]))
    contexts = contexts_of(parts, first_inputs(parts, 9), tokens, 9, span.rest)
    truth = torch.searchsorted(tokens, text)
    guess = truth[
        [0, 2, 3, 1, 4, 5, 6, 7, 8]
    ]  # rows of three positions have another's token
    right = (guess == truth).nonzero()[:, 0]
    may = torch.ones(len(tokens), 9, dtype=torch.bool)
    may[:, 0] = False  # it is known
    for _ in range(2):
        given = torch.zeros(may.shape)
        masses = contexts.masses(guess, right, torch.ones(len(right)), 1, may, given)
        guess[1:] = masses.argmax(0)[1:]
    assert guess.tolist() == truth.tolist()
    assert masses[truth, torch.arange(9)][1:].min() > 0.5
    assert float(contexts.misfit(guess)) < 1e-9
