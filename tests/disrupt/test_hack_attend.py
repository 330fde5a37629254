"""HackAttend on tiny models: flips and counts are checked independently."""

from __future__ import annotations

import json
import math

import pytest
import reference_disrupt as reference
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_architectures
import tiny_heads
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.disrupt import RANKINGS, Control, Disruption, Greedy, HackAttend, Rerank
from keyhole.models.masking import Untouched, rewriting

QUICK = {"schedule": Rerank(rounds=3, prefixes=4, refine=2), "batch": 32}


class Cut(Untouched):
    """Cuts one example's units, as listed in the result."""

    def __init__(self, cut, sequences=1):
        self.units = cut
        self.sequences = sequences
        self.zeros = []

    def cut(self, site, shape):
        mask = torch.zeros(shape, dtype=torch.bool)
        for unit in self.units:
            if unit.layer == site.index:
                mask[unit.sequence, unit.head, unit.query, unit.key] = True
        return mask

    def seen(self, site, probabilities):
        self.zeros.append(probabilities == 0)


def plain(batch, row):
    return {
        name: value[row : row + 1]
        for name, value in batch.items()
        if name != "special_tokens_mask"
    }


def attacked(family="bert", task="classes", count=4, seed=0, method=None, **options):
    model = tiny_heads.model(family, task, classes=options.pop("classes", 2), seed=seed)
    batch = tiny_heads.texts(count, seed=seed, **options)
    labels = tiny_heads.own_labels(model, batch)
    method = method or HackAttend(share=0.2, **QUICK)
    return model, batch, labels, method(model, batch, labels)


def test_every_flip_is_confirmed_by_a_naive_bert():
    """The same masks, as −∞ in a naive BERT, give the same answers."""
    model, batch, labels, found = attacked(seed=1)
    assert found.flips
    for row, outcome in enumerate(found.outcomes):
        inputs = plain(batch, row)
        cut = [(unit.layer, unit.head, unit.query, unit.key) for unit in outcome.cut]
        logits = reference.bert_logits(
            model, inputs["input_ids"], inputs["attention_mask"], cut
        )
        assert (int(logits.argmax()),) == outcome.after
        assert outcome.flipped == (int(logits.argmax()) != int(labels[row]))
        sure = float(logits.softmax(-1)[0, labels[row]])
        assert outcome.confidence_after == pytest.approx(sure, abs=1e-5)


@pytest.mark.parametrize("scope", ["head", "model"])
def test_counts_are_those_of_zero_probabilities(scope):
    method = HackAttend(share=0.05, scope=scope, **QUICK)
    model, batch, _, found = attacked(method=method, seed=2)
    for row, outcome in enumerate(found.outcomes):
        inputs = plain(batch, row)
        n = int(inputs["attention_mask"].sum())
        cut = Cut(outcome.cut)
        with rewriting(model, cut):
            model(**inputs)
        zeros = torch.stack(cut.zeros)[:, 0, :, :n, :n]
        per_head = zeros.sum((-1, -2))
        assert outcome.masked == len(outcome.cut) == int(zeros.sum())
        assert outcome.units == 2 * 4 * n * n
        assert outcome.share == int(zeros.sum()) / (2 * 4 * n * n)
        assert outcome.heads == int((per_head > 0).sum())
        assert outcome.worst_head == pytest.approx(int(per_head.max()) / (n - 1) ** 2)
        part = int(zeros.sum()) / (max(1, outcome.heads) * (n - 1) ** 2)
        assert outcome.perturbation == pytest.approx(part)
        if scope == "head":
            assert int(per_head.max()) <= 0.05 * (n - 1) ** 2
        else:
            assert outcome.masked <= 0.05 * outcome.units


@given(
    share=st.floats(0, 0.3),
    seed=st.integers(0, 5),
    scope=st.sampled_from(["head", "model"]),
    ranking=st.sampled_from(list(RANKINGS)),
    schedule=st.sampled_from(
        [Rerank(rounds=2, prefixes=3, refine=1, restarts=1), Greedy()]
    ),
)
@settings(max_examples=6, deadline=None)
def test_budgets_hold_and_spared_units_are_not_cut(
    share, seed, scope, ranking, schedule
):
    method = HackAttend(share=share, scope=scope, ranking=ranking, schedule=schedule)
    _, batch, _, found = attacked(method=method, seed=seed, count=2)
    for row, outcome in enumerate(found.outcomes):
        n = int(batch["attention_mask"][row].sum())
        special = set(batch["special_tokens_mask"][row].nonzero().flatten().tolist())
        heads = {}
        for unit in outcome.cut:
            heads[unit.layer, unit.head] = heads.get((unit.layer, unit.head), 0) + 1
            assert not {unit.query, unit.key} & special
        if scope == "head":
            assert max(heads.values(), default=0) <= share * (n - 1) ** 2 + 1e-6
        else:
            assert sum(heads.values()) <= share * outcome.units + 1e-6


def test_special_tokens_are_guessed_without_the_tokenizers_mask():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(3)
    labels = tiny_heads.own_labels(model, batch)
    method = HackAttend(share=0.3, **QUICK)
    labelled = method(model, batch, labels)
    guessed = method(
        model, {k: v for k, v in batch.items() if "special" not in k}, labels
    )
    assert labelled.outcomes == guessed.outcomes


def test_spare_chooses_the_units_that_are_not_cut():
    for spare, expected in (("special keys", (True, False)), ("padding", (True, True))):
        method = HackAttend(
            share=0.6, spare=spare, ranking="attention", loss="margin", **QUICK
        )
        _, batch, _, found = attacked(method=method)
        special = batch["special_tokens_mask"].bool()
        units = [
            (row, unit)
            for row, outcome in enumerate(found.outcomes)
            for unit in outcome.cut
        ]
        queries = any(bool(special[row, unit.query]) for row, unit in units)
        keys = any(bool(special[row, unit.key]) for row, unit in units)
        assert (queries, keys) == expected
        assert all(bool(batch["attention_mask"][row, unit.key]) for row, unit in units)


@pytest.mark.parametrize("schedule", [QUICK["schedule"], Greedy()])
def test_a_share_of_zero_changes_nothing(schedule):
    method = HackAttend(share=0.0, schedule=schedule, batch=32)
    _, _, _, found = attacked(method=method)
    assert found.control.change == found.control.own == found.control.flips == 0
    assert found.success == 0
    for outcome in found.outcomes:
        assert outcome.confidence_after == outcome.confidence_before
        assert (outcome.masked, outcome.cut, outcome.after) == (0, (), outcome.before)


def test_wrong_examples_are_skipped_and_counted():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(4)
    labels = tiny_heads.own_labels(model, batch)
    labels[1] = 1 - labels[1]
    found = HackAttend(share=0.2, **QUICK)(model, batch, labels, ids=list("abcd"))
    assert [outcome.right for outcome in found.outcomes] == [True, False, True, True]
    assert (found.skipped, len(found.attacked), found.accuracy) == (1, 3, 0.75)
    assert (found.outcomes[1].queries, found.outcomes[1].id) == (0, "b")


def test_only_flips_to_the_target_count():
    model = tiny_heads.model("bert", "classes", classes=4, seed=3)
    batch = tiny_heads.texts(6, seed=3)
    labels = tiny_heads.own_labels(model, batch)
    wanted = (labels + 1) % 4
    found = HackAttend(share=0.4, **QUICK)(model, batch, labels, targets=wanted)
    assert found.flips
    for outcome, target in zip(found.outcomes, wanted.tolist(), strict=True):
        assert outcome.flipped == (outcome.after == (target,))
    single = HackAttend(share=0.4, target=int(labels[0]), **QUICK)(model, batch, labels)
    assert not single.outcomes[0].right  # already at the target


def test_restarts_aim_at_other_classes_and_keep_earlier_flips():
    base = {"rounds": 2, "prefixes": 3, "refine": 0}
    model = tiny_heads.model("bert", "classes", classes=5, seed=4)
    batch = tiny_heads.texts(8, seed=4)
    labels = tiny_heads.own_labels(model, batch)
    once = HackAttend(0.1, schedule=Rerank(**base))(model, batch, labels)
    more = HackAttend(0.1, schedule=Rerank(**base, restarts=3))(model, batch, labels)
    assert more.flips >= once.flips
    for first, second in zip(once.outcomes, more.outcomes, strict=True):
        assert second.flipped or not first.flipped
        assert second.queries > first.queries or first.flipped


def test_a_batch_gives_the_results_of_single_examples():
    model, batch, labels, batched = attacked(count=5, seed=5)
    method = HackAttend(share=0.2, **QUICK)
    alone = [
        method(
            model,
            {k: v[row : row + 1] for k, v in batch.items()},
            labels[row : row + 1],
        )
        for row in range(5)
    ]
    for single, outcome in zip(alone, batched.outcomes, strict=True):
        assert single.outcomes[0].cut == outcome.cut
        assert single.outcomes[0].flipped == outcome.flipped


@pytest.mark.parametrize(
    ("order", "scale"),
    [
        ("importance", "full"),
        ("random layer", "half"),
        ("random head", "full"),
        ("random", "half"),
    ],
)
def test_as_released_one_at_a_time_and_in_batches(order, scale):
    """The paper's loop over single queries gives the same masks as batches."""
    results = [
        attacked(
            method=HackAttend.as_released(0.05, scale, order=order, batch=size),
            seed=6,
            count=2,
        )[3]
        for size in (1, 64)
    ]
    for single, batched in zip(results[0].outcomes, results[1].outcomes, strict=True):
        assert (single.cut, single.steps) == (batched.cut, batched.steps)
        n = round((single.units / 8) ** 0.5)
        k = max(1, int(0.05 * (n - 1) ** 2))
        assert single.heads <= (8 if scale == "full" else 2)
        assert single.masked == single.heads * k == single.steps * k


def test_the_released_order_is_by_the_confidence_without_a_head():
    """Layers first, then heads, by the confidence with each gated to zero."""
    method = HackAttend.as_released(0.02, batch=1)
    model, batch, labels, found = attacked(seed=7, method=method, count=2)

    class Gate(Untouched):
        def __init__(self, layer, heads):
            self.layer = layer
            self.heads = heads

        def gate(self, site, shape):
            gate = torch.ones(shape)
            if site.index == self.layer:
                gate[:, self.heads] = 0
            return gate

    def sure(row, layer, heads):
        with torch.no_grad(), rewriting(model, Gate(layer, heads)):
            return float(model(**plain(batch, row)).logits.softmax(-1)[0, labels[row]])

    for row, outcome in enumerate(found.outcomes):
        layers = sorted(range(2), key=lambda layer: sure(row, layer, list(range(4))))
        order = []
        for layer in layers:
            cost = [sure(row, layer, [head]) for head in range(4)]
            order += [(layer, head) for head in sorted(range(4), key=cost.__getitem__)]
        assert {(unit.layer, unit.head) for unit in outcome.cut} == set(
            order[: outcome.steps]
        )


def test_multiple_choice_counts_the_matrix_of_each_choice():
    model = tiny_heads.model("bert", "choice", seed=8)
    batch = tiny_heads.texts(3, choices=3, seed=8)
    labels = tiny_heads.own_labels(model, batch)
    found = HackAttend(share=0.2, **QUICK)(model, batch, labels)
    assert found.flips
    for row, outcome in enumerate(found.outcomes):
        cut = Cut(outcome.cut)
        with rewriting(model, cut), torch.no_grad():
            answer = int(model(**plain(batch, row)).logits.argmax())
        assert outcome.after == (answer,)
        real = batch["attention_mask"][row].sum(-1)
        assert outcome.units == int((8 * real**2).sum())
        for unit in outcome.cut:
            assert unit.sequence < 3
            assert not batch["special_tokens_mask"][row, unit.sequence, unit.key]
        heads = {}
        for unit in outcome.cut:
            key = (unit.sequence, unit.layer, unit.head)
            heads[key] = heads.get(key, 0) + 1
        assert all(
            count <= 0.2 * (int(real[key[0]]) - 1) ** 2 for key, count in heads.items()
        )


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("left", [False, True])
def test_next_tokens_flip_below_the_diagonal(family, left):
    model = tiny_heads.model(family, "causal", seed=9)
    batch = tiny_heads.texts(3, framed=False, left=left, seed=9)
    found = HackAttend(share=0.3, **QUICK)(model, batch)
    assert found.flips
    for row, outcome in enumerate(found.outcomes):
        real = batch["attention_mask"][row].nonzero().flatten()
        assert all(unit.key <= unit.query for unit in outcome.cut)
        assert all(unit.key in real and unit.query in real for unit in outcome.cut)
        # Without the others and the padding, the text has the same next token.
        ids = batch["input_ids"][row, real][None]
        with torch.no_grad():
            assert outcome.before == (int(model(ids).logits[0, -1].argmax()),)
        shifted = [
            unit.__class__(
                unit.layer,
                unit.head,
                unit.query - int(real[0]),
                unit.key - int(real[0]),
            )
            for unit in outcome.cut
        ]
        with torch.no_grad(), rewriting(model, Cut(shifted)):
            assert outcome.after == (int(model(ids).logits[0, -1].argmax()),)


def test_causal_units_are_a_triangle():
    model = tiny_heads.model("gpt2", "causal")
    batch = tiny_heads.texts(1, framed=False)
    (outcome,) = HackAttend(share=0.1, **QUICK)(model, batch).outcomes
    n = batch["input_ids"].shape[1]
    assert outcome.units == 8 * n * (n + 1) // 2


def test_a_continuation_is_the_models_own_and_can_be_flipped():
    model = tiny_heads.model("gpt2", "causal", seed=10)
    batch = tiny_heads.texts(3, framed=False, seed=10)
    found = HackAttend(share=0.3, continuation=3, **QUICK)(model, batch)
    assert found.flips
    for row, outcome in enumerate(found.outcomes):
        ids = batch["input_ids"][row, batch["attention_mask"][row].bool()]
        for token in outcome.before:
            with torch.no_grad():
                assert int(model(ids[None]).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([token])])
        assert outcome.flipped == (outcome.after != outcome.before)


@pytest.mark.parametrize(("family", "continuation"), [("t5", 1), ("bart", 3)])
def test_sequence_to_sequence(family, continuation):
    model = tiny_heads.model(family, "seq2seq", seed=11)
    batch = tiny_heads.texts(3, seed=11)
    found = HackAttend(share=0.3, continuation=continuation, **QUICK)(model, batch)
    assert found.flips
    assert all(len(outcome.before) == continuation for outcome in found.outcomes)
    layers = {unit.layer for outcome in found.outcomes for unit in outcome.cut}
    assert layers <= set(range(6))  # encoder, decoder and cross attention
    forced = {**batch, "decoder_input_ids": torch.full((3, 4), 7)}
    teacher = HackAttend(share=0.3, **QUICK)(model, forced)
    assert all(len(outcome.before) == 4 for outcome in teacher.outcomes)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_images(family):
    model = tiny_heads.model(family, "image", classes=3, seed=12)
    batch = tiny_architectures.inputs(family)
    method = HackAttend(share=0.05, schedule=Rerank(rounds=1, prefixes=2, refine=1))
    found = method(model, batch, tiny_heads.own_labels(model, batch))
    assert found.control.change == 0
    assert any(outcome.masked for outcome in found.outcomes)


@pytest.mark.parametrize(
    "family", ["albert", "modernbert", "distilbert", "roberta", "electra"]
)
def test_other_encoders(family):
    method = HackAttend(share=0.2, schedule=Rerank(rounds=2, prefixes=2, refine=1))
    _, batch, _, found = attacked(family, method=method, count=2)
    assert found.control.change == 0
    for row, outcome in enumerate(found.outcomes):
        special = batch["special_tokens_mask"][row].bool()
        assert outcome.cut
        assert not any(special[unit.query] or special[unit.key] for unit in outcome.cut)


def test_results_round_trip_through_json(tmp_path):
    *_, found = attacked(count=2)
    found.save(tmp_path / "flips.json")
    assert Disruption.load(tmp_path / "flips.json") == found
    lines = repr(found).splitlines()
    assert lines[0].startswith(f"Disruption: {found.flips} of 2 right answers flipped")
    assert len(lines) == 3
    for broken, words in (
        ({}, "reads format 1, not None"),
        ({"format": 1}, "expected a saved disruption, got None"),
        (
            {**found.to_dict(), "outcomes": [{}]},
            r"outcomes\[0\].id is missing in a saved disruption",
        ),
        ({**found.to_dict(), "control": {}}, "control.change is missing"),
    ):
        with pytest.raises(InputError, match=words):
            Disruption.from_dict(broken)


@pytest.mark.parametrize(
    "method",
    [
        HackAttend(0.3, **QUICK),
        HackAttend.as_released(0.05, "half", order="random head"),
        HackAttend.strongest(
            scope="model", spare="padding", target=1, rounds=2, refine=1
        ),
        HackAttend.random(seed=3),
    ],
)
def test_the_method_of_a_result_makes_the_same_attack(method):
    *_, found = attacked(method=method, count=1)
    saved = json.loads(json.dumps(found.method))
    assert HackAttend.from_dict(saved) == method
    with pytest.raises(InputError, match="not the settings of a HackAttend: KeyError"):
        HackAttend.from_dict({"share": 0.1})


def test_words_describe_what_is_cut():
    released = HackAttend.as_released
    assert released(0.005).words == "0.5% of each head's attention cut, as released"
    magnitude = released(ranking="magnitude", scale="half", order="random head").words
    assert magnitude.endswith(
        "as released, ranked by magnitude, random head order, half scale"
    )
    assert HackAttend().words == "1% of each head's attention cut"
    assert HackAttend(spare="padding").words.endswith(
        "attention cut, only padding spared"
    )
    by_chance = HackAttend(ranking="random", scope="model")
    assert by_chance.words == "1% of all attention cut at random"
    assert by_chance.control
    assert HackAttend.random().control
    assert not released().control


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"spare": "special", "order": "random", "scale": "half"},
            "each head's attention cut, released schedule, random order, half scale, "
            "special tokens spared",
        ),
        ({"scope": "model"}, "all attention cut, released schedule"),
        ({"loss": "margin"}, "each head's attention cut, released schedule"),
        ({"target": 1}, "each head's attention cut, released schedule"),
        ({"least": 0}, "each head's attention cut, released schedule"),
    ],
)
def test_only_the_released_settings_are_called_as_released(changes, words):
    assert HackAttend.as_released(**changes).words == f"1% of {words}"
    assert "as released" not in HackAttend(schedule=Greedy()).words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HackAttend(share=2), "share must be at most 1, not 2"),
        (
            lambda: HackAttend(ranking="best"),
            "ranking must be one of removal, .*not best",
        ),
        (
            lambda: HackAttend(scope="layer"),
            "scope must be one of head, model, not layer",
        ),
        (lambda: HackAttend(spare="none"), "spare must be one of special, .*not none"),
        (lambda: HackAttend(batch=0), "batch must be 1 or more, not 0"),
        (lambda: HackAttend(continuation=0), "continuation must be 1 or more, not 0"),
        (
            lambda: HackAttend(schedule="greedy"),
            "expected a schedule Greedy.. or Rerank.., got",
        ),
        (lambda: Rerank(rounds=0), "rounds must be 1 or more, not 0"),
        (lambda: Rerank(restarts=-1), "restarts must be 0 or more, not -1"),
        (lambda: Greedy(order="best"), "order must be one of importance, .*not best"),
        (lambda: Greedy(scale="third"), "scale must be one of full, half, not third"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_wrong_inputs_are_refused():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(2)
    method = HackAttend(**QUICK)
    labels = tiny_heads.own_labels(model, batch)
    for arguments, options, words in (
        ((batch, None), {}, "a classifier needs labels"),
        ((batch, labels[:1]), {}, "expected 2 labels, got shape"),
        ((batch, labels), {"ids": ["a"]}, "ids must name 2 examples: 1 were given"),
        ((batch, labels), {"targets": torch.zeros(2, 3)}, "expected .*targets"),
    ):
        with pytest.raises(InputError, match=words):
            method(model, *arguments, **options)
    with pytest.raises(InputError, match="eval"):
        method(model.train(), batch, labels)
    with pytest.raises(InputError, match="head"):
        method(tiny_architectures.model("bert"), batch, labels)
    refused = tiny_heads.model("bloom", "causal")
    with pytest.raises(InputError, match="AttentionInterface"):
        method(refused, batch)


def test_search_and_judge_agree_on_flips(monkeypatch):
    """Search and judge read the same masks, so they find the same flips."""
    claims = []
    original = Rerank.__call__

    def listening(*arguments):
        proposal = original(*arguments)
        claims.extend(proposal.flipped.tolist())
        return proposal

    monkeypatch.setattr(Rerank, "__call__", listening)
    for prefixes in (1, 3, 50):
        method = HackAttend(
            share=0.1, schedule=Rerank(rounds=2, prefixes=prefixes, refine=2)
        )
        claims.clear()
        *_, found = attacked(method=method, classes=5, seed=4, count=8)
        assert claims == [outcome.flipped for outcome in found.outcomes]
        assert any(claims)


def test_the_judge_rejects_masks_that_break_the_rules():
    from keyhole.disrupt.budget import budget
    from keyhole.disrupt.judge import judge
    from keyhole.disrupt.tasks import ask
    from keyhole.disrupt.units import survey

    model, batch, labels, found = attacked(seed=1)
    question = ask(model, batch, labels)
    units = survey(model, question)
    cut = torch.zeros_like(units.free)
    for row, outcome in enumerate(found.outcomes):
        for unit in outcome.cut:
            place = units.places[unit.layer]
            units.at(cut, place)[row, 0, unit.head, unit.query, unit.key] = True
    limits = budget(units, 0.2, "head")
    honest = judge(model, question, units, cut, limits, 8).flipped
    assert honest.tolist() == [outcome.flipped for outcome in found.outcomes]
    tight = budget(units, 0.01, "model")
    tight.total.zero_()
    assert not judge(model, question, units, cut, tight, 8).flipped.any()
    cut[:, 0] = True  # [CLS] to [CLS]
    assert not judge(model, question, units, cut, limits, 8).flipped.any()


def test_what_answers_nan_only_under_a_cut_has_kept_nothing(monkeypatch):
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(2)
    labels = tiny_heads.own_labels(model, batch)
    softmax = torch.softmax

    def breaking(scores, *args, **options):
        cut = (scores == torch.finfo(scores.dtype).min).any()
        return softmax(scores, *args, **options) * (torch.nan if cut else 1)

    monkeypatch.setattr(torch, "softmax", breaking)
    batch = {
        name: value[:1] for name, value in batch.items()
    }  # the longest text: no padding
    with pytest.raises(InputError, match="NaN or infinity: its numbers overflow"):
        HackAttend(share=0.2, **QUICK)(model, batch, labels[:1])


def test_a_control_that_is_nan_stays_nan():
    for parts in ([0.0, math.nan], [math.nan, 0.0]):
        first, second = (Control(part, part, 0) for part in parts)
        found = first.joined(second)
        assert math.isnan(found.change)
        assert math.isnan(found.own)


def test_flips_mean_nothing_if_rewriting_alone_changes_answers():
    """The model has an attention function of its own, which `rewriting` replaces by another."""

    def backwards(module, query, key, value, attention_mask, **_):
        weights = torch.softmax(-(query @ key.mT), -1)
        return (weights @ -value * 9).transpose(1, 2).contiguous(), weights

    transformers.AttentionInterface.register("backwards", backwards)
    model = tiny_heads.model("bert", "classes", seed=1)
    batch = tiny_heads.texts(8, seed=1)
    model.set_attn_implementation("backwards")
    labels = tiny_heads.own_labels(model, batch)
    found = HackAttend(share=0.2, **QUICK)(model, batch, labels)
    assert found.control.flips
    assert found.attacked
    assert found.status is Status.NOT_APPLICABLE
    first = found.summary().splitlines()[0]
    assert first.startswith(
        "could not check: the attack's own attention function changes"
    )
    assert "of all units" not in first
