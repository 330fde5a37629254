"""What the benchmarks compute next to the library: substitutions, factors, pairs, taken weights."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import disrupt_ablations
import subjects
import tasks
import trained
from keyhole.data import Example
from substitution import Victim, WordSubstitution, judged

pytestmark = pytest.mark.release  # what belongs to benchmarks
DOCS = Path(__file__).parent.parent / "docs"
LETTERS = [chr(ord("a") + number) * 2 for number in range(26)]
WORDS = [*LETTERS, *(word.upper() for word in LETTERS[:6]), "##ab", "x7", "beginning"]


@pytest.fixture(scope="module")
def victim():
    words = subjects.word_tokenizer([*subjects.SPECIAL, *WORDS], framed=True)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=40,
        num_labels=3,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = (
            transformers.BertForSequenceClassification(config)
            .eval()
            .requires_grad_(False)
        )
    return Victim(model, words, set(WORDS) - {"beginning"})


def sentences(victim, count, length=9):
    """Random words, labelled as the model answers."""
    stream = np.random.default_rng(0)
    for number in range(count):
        text = " ".join(stream.choice(WORDS, length))
        yield Example(str(number), int(answers(victim, text).argmax()), text)


def answers(victim, text):
    """The logits of one text alone."""
    return (
        victim.model(**victim.tokenizer([text], return_tensors="pt")).logits[0].numpy()
    )


def margin(victim, words, label):
    logits = answers(victim, " ".join(words))
    return logits[label] - max(
        value for place, value in enumerate(logits) if place != label
    )


def naive_neighbours(victim, word, nearest, cosine):
    """Every pair of rows of the table, one product at a time."""
    table = victim.model.get_input_embeddings().weight.double().numpy()
    names = victim.tokenizer.convert_ids_to_tokens(list(range(len(table))))
    if not word.isalpha() or word == "beginning":
        return []
    own = table[names.index(word)]
    scored = []
    for row, name in zip(table, names, strict=True):
        if name not in (word, "beginning") and name.isalpha():
            value = float(row @ own) / math.sqrt(float(row @ row) * float(own @ own))
            scored.append((-value, name))
    best = [name for value, name in sorted(scored)[:nearest] if -value >= cosine]
    return [name for name in best if name.islower() == word.islower()]


def naive(victim, example, attack):
    """The attack written out: one text at a time, nothing remembered."""
    words = example.text.split()
    most = max(1, math.floor(attack.share * len(words)))
    order = []
    for place in range(len(words)):
        if naive_neighbours(victim, words[place], attack.nearest, attack.cosine):
            without = [*words[:place], "[UNK]", *words[place + 1 :]]
            order.append((margin(victim, without, example.label), place))
    changed = 0
    for _, place in sorted(order):
        now = margin(victim, words, example.label)
        if now < 0 or changed == most:
            break
        best = None
        for other in naive_neighbours(
            victim, example.text.split()[place], attack.nearest, attack.cosine
        ):
            tried = [*words[:place], other, *words[place + 1 :]]
            value = margin(victim, tried, example.label)
            if value < now and (best is None or value < best[0]):
                best = (value, tried)
        if best:
            words = best[1]
            changed = changed + 1
    return " ".join(words)


def test_the_attack_is_the_one_written_out_in_loops(victim):
    attack = WordSubstitution(share=0.25, nearest=4, cosine=0.4)
    flipped = 0
    for example in sentences(victim, 12):
        text, _ = attack(victim, example)
        assert text == naive(victim, example, attack)
        verdict = judged(victim, example, text)
        assert verdict["changed"] <= 2
        assert verdict["flipped"] == (
            int(answers(victim, text).argmax()) != example.label
        )
        flipped += verdict["flipped"]
    assert 0 < flipped < 12


def test_neighbours_are_words_of_the_same_case(victim):
    for word in ("aa", "BB"):
        others = victim.neighbours(word, 40, -1.0)
        assert set(others) <= set(WORDS) - {word, "##ab", "x7", "beginning"}
        assert all(other.islower() == word.islower() for other in others)
    assert (
        victim.neighbours("x7", 40, -1.0)
        == victim.neighbours("beginning", 40, -1.0)
        == []
    )
    assert victim.neighbours("unknown", 40, -1.0) == []


def test_every_context_and_every_ending_stand_once_in_each_class():
    made = [
        Example(
            f"{number}",
            number % 4,
            f"subject {number % 3}: context {number}",
            "",
            tuple(f"ending {number}/{choice}" for choice in range(4)),
        )
        for number in range(10)
    ]
    alone = Example("alone", 0, "nobody else: context", "", ("one", "two"))
    pairs = tasks.paired([*made, alone])
    assert len(pairs) == 20
    for label in (0, 1):
        chosen = [pair for pair in pairs if pair.label == label]
        assert sorted(pair.text for pair in chosen) == sorted(
            example.text for example in made
        )
        assert sorted(pair.second for pair in chosen) == sorted(
            example.choices[example.label] for example in made
        )
    own = {example.text: example.choices[example.label] for example in made}
    assert all((own[pair.text] == pair.second) == pair.label for pair in pairs)


def answered(margin, tokens, entropy, flipped):
    return {
        "margin": margin,
        "tokens": tokens,
        "entropy": entropy,
        "flipped": {"strongest": flipped},
    }


def test_factors_tell_what_flipping_depends_on():
    stream = np.random.default_rng(0)
    runs = []
    for what, shift in (("easy", 0.0), ("hard", 2.0)):
        drawn = stream.normal(size=(400, 3))
        drawn[:, 0] += shift
        flipped = stream.random(400) < 1 / (1 + np.exp(2 * drawn[:, 0]))
        runs.append(
            {
                "what": what,
                "method": "plain",
                "answers": [
                    answered(*row, bool(flip))
                    for row, flip in zip(drawn, flipped, strict=True)
                ],
            }
        )
    rows = {row.what: row for row in tasks.by_factor(runs)}
    shares = rows["easy, plain, strongest: flips by quarter of margin"].measured.split(
        ", "
    )
    assert [int(share[:-1]) for share in shares] == sorted(
        (int(share[:-1]) for share in shares), reverse=True
    )


def test_larger_counts_pairs():
    values = torch.tensor([1.0, 2.0, 2.0, 3.0])
    flipped = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert tasks.larger(values, flipped) == (2 + 1 + 0.5) / 4
    assert tasks.quarters(values, flipped) == [0.0, 1.0, 0.0, 1.0]


def test_entropy_is_the_mean_over_heads_and_real_queries():
    stream = torch.Generator().manual_seed(0)
    a = torch.rand(2, 2, 3, 5, 5, generator=stream)
    lengths = [[5, 3], [2, 4]]
    exists = torch.zeros_like(a, dtype=torch.bool)
    for example, sequence in np.ndindex(2, 2):
        n = lengths[example][sequence]
        exists[example, sequence, :, :n, :n] = True
    a = (a * exists) / (a * exists).sum(-1, keepdim=True).clamp(min=1e-9)
    a[~exists] = 0.2  # what stands at padding must not count
    measured = trained.entropy(a, exists)
    for example in range(2):
        values = []
        for sequence, head in np.ndindex(2, 3):
            n = lengths[example][sequence]
            for query in range(n):
                row = a[example, sequence, head, query, :n].double().numpy()
                values.append(-sum(value * math.log(value) for value in row))
        assert float(measured[example]) == pytest.approx(np.mean(values), rel=1e-12)


def test_answers_are_described_by_their_own_margin_length_and_maps(victim):
    right = list(sentences(victim, 5, length=4)) + list(sentences(victim, 2, length=9))
    right = [
        Example(str(number), each.label, each.text) for number, each in enumerate(right)
    ]
    batches = trained.Batches(victim.model, victim.tokenizer, right, batch_size=3)
    known = {answer["id"]: answer for answer in trained.described(batches)}
    assert len(known) == 7
    for example in right:
        alone = trained.Batches(victim.model, victim.tokenizer, [example])
        (answer,) = trained.described(alone)
        assert known[example.id]["tokens"] == len(example.text.split()) + 2
        for name, value in (
            ("margin", margin(victim, example.text.split(), example.label)),
            ("entropy", answer["entropy"]),
        ):
            assert known[example.id][name] == pytest.approx(
                float(value), rel=1e-4, abs=1e-5
            )


def test_a_mean_over_fewer_models_than_the_others_says_so():
    def point(model, share, flips):
        return disrupt_ablations.Measured(
            model, "a", share, 10, flips, 0.0, 0.0, 1.0, 1.0, 0.0
        )

    points = [
        point("first", 0.01, 1),
        point("second", 0.01, 3),
        point("first", 0.05, 4),
    ]
    whole, part = (disrupt_ablations.row(points, "a", share) for share in (0.01, 0.05))
    assert whole.measured == "20.0% (10.0%–30.0%)"
    assert whole.details.startswith("1 of 10 + 3 of 10;")
    assert part.details.startswith("1 of 2 models; 4 of 10;")


def test_ablations_join_what_they_write_and_what_documents_keep(tmp_path):
    point = disrupt_ablations.Measured(
        "first", "a", 0.01, 10, 1, 0.0, 0.0, 1.0, 1.0, 0.0
    )
    file = tmp_path / "rows.json"
    record = {"commit": "abc", "machine": "a machine", "runs": [asdict(point)]}
    file.write_text(json.dumps(record))
    assert disrupt_ablations.read([file]) == [point]
    for name in ("disrupt-ablations", "disrupt-ablations-minilm"):
        assert disrupt_ablations.read([DOCS / f"{name}.json"])
