"""Targets that leak behind a link or in a short format: none is called clean, most are read."""

from __future__ import annotations

import pytest
import torch

from keyhole import extract, oracle
from keyhole.extract import Status
from keyhole.extract.auto import find_link
from keyhole.extract.gauss_newton import refined, uncertainty
from keyhole.oracle.links import Linked

EXPOSED = (Status.RECOVERED, Status.WITHIN, Status.INEXACT)
UNCHECKED = (
    Status.MISMATCH,
    Status.UNVERIFIED,
    Status.NOT_APPLICABLE,
    Status.ORACLE_FAILED,
)
FORMS = {
    "float32": lambda y: y.float().double(),
    "bfloat16": lambda y: y.bfloat16().double(),
    "3 decimals": lambda y: y.round(decimals=3),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda y: torch.stack([torch.zeros_like(y), y + 0.3], -1).softmax(-1),
    "affine": lambda y: 2.5 * y - 0.7,
}
KINDS = {
    "head": lambda: oracle.plant("head", dim=4, seed=2),
    "low rank": lambda: oracle.plant("head", dim=6, rank=2, seed=2),
    "several heads": lambda: oracle.plant("multi-head", dim=4, heads=2, seed=1),
    "one layer": lambda: oracle.plant("one-layer", dim=4, width=4, seed=2),
}
# Every form with one head and with a layer; the others once rounded, once behind a
# link.
PAIRS = [
    (kind, form)
    for kind in KINDS
    for form in FORMS
    if kind in ("head", "one layer") or form in ("bfloat16", "sigmoid", "softmax")
]


class Answering:
    def __init__(self, inner, form):
        self.inner = inner
        self.form = form
        self.dim = inner.dim

    def __call__(self, sequences):
        return self.form(self.inner(sequences))


@pytest.mark.parametrize(("kind", "form"), PAIRS)
def test_no_leaking_target_is_called_clean(kind, form):
    target = Answering(KINDS[kind](), FORMS[form])
    result = extract.Auto()(target)
    assert result.status in EXPOSED, result.reason
    stream = torch.Generator().manual_seed(5)
    fresh = torch.randn(64, 3, target.dim, generator=stream, dtype=torch.float64) / 3
    truth = target(fresh)
    wrong = (result.model(fresh) - truth).abs().max() / truth.abs().max()
    assert wrong <= (0.05 if form in ("bfloat16", "3 decimals") else 1e-4)


@pytest.mark.parametrize("gain", [0.1, 0.01])
@pytest.mark.parametrize("decimals", [1, 2])
def test_what_is_rounded_to_zero_is_not_called_clean(decimals, gain):
    """Short tokens all answer 0 there; long ones do not."""
    for kind, options in (("head", {"dim": 5}), ("one-layer", {"dim": 5, "width": 4})):
        planted = oracle.plant(kind, seed=3, **options)
        target = Answering(planted, lambda y: (gain * y).round(decimals=decimals))
        result = extract.Auto(seed=3)(target)
        assert result.status in (EXPOSED if kind == "head" else (*EXPOSED, *UNCHECKED))
    heads = oracle.plant("multi-head", dim=4, heads=2, seed=3)
    target = Answering(heads, lambda y: (gain * y).round(decimals=decimals))
    assert extract.Auto(seed=3)(target).status in (*EXPOSED, *UNCHECKED)


def test_a_judge_stays_where_a_link_says_something():
    """One of its questions saturates the tanh: it asks smaller ones, and says how far it went."""
    target = Answering(oracle.plant("head", dim=12, rank=2, seed=1), torch.tanh)
    result = extract.Auto(seed=1)(target)
    assert result.status is Status.RECOVERED
    assert result.domain.norms[1] < 10


@pytest.mark.parametrize("form", ["sigmoid", "tanh", "softmax", "affine"])
def test_a_link_is_found_and_the_model_answers_behind_it(form, tmp_path):
    head = oracle.plant("head", dim=5, seed=3)
    target = Answering(head, FORMS[form])
    link = find_link(target, 0, 1e-16)[0]
    assert link.name == ("identity" if form == "affine" else form)
    result = extract.Auto()(target)
    assert isinstance(result.model, Linked)
    assert f"behind {link}" in result.reason
    factor = 2.5 if form == "affine" else 1.0
    assert torch.allclose(result.model.v, factor * head.v, atol=1e-9)
    assert torch.allclose(result.model.W, head.W, atol=1e-7)
    result.save(tmp_path / "stolen.json")
    again = extract.Extraction.load(tmp_path / "stolen.json")
    some = torch.randn(4, 2, 5, dtype=torch.float64)
    assert torch.equal(again.model(some), result.model(some))


def test_a_plain_head_has_no_link():
    head = oracle.plant("head", dim=5, seed=3)
    link = find_link(head, 0, 1e-16)[0]
    assert (link.name, str(link)) == ("identity", "nothing")
    assert extract.Auto()(head).model.kind == "head"


@pytest.mark.parametrize("heads", [1, 2])
def test_fitted_heads_are_the_planted_ones(heads):
    planted = oracle.plant("multi-head", dim=4, heads=heads, seed=7)
    target = Answering(planted, FORMS["float32"])
    result = extract.Fitted(precision=6e-8)(target)
    assert result.status is Status.RECOVERED, result.reason
    W = result.model.W if heads > 1 else [result.model.W]
    for truth in planted.W:
        assert min(float((truth - found).abs().max()) for found in W) <= 1e-5


def test_decimals_are_no_obstacle_to_several_heads():
    """Long keys and a short last token make answers larger than their rounding."""
    planted = oracle.plant("multi-head", dim=4, heads=2, seed=1)
    result = extract.Auto()(Answering(planted, FORMS["3 decimals"]))
    assert result.status is Status.RECOVERED, result.reason
    for truth in planted.W:
        assert (
            min(float((truth - found).abs().max()) for found in result.model.W) <= 1e-7
        )


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["head", "several heads"])
def test_noise_is_no_obstacle(kind, fresh):
    """Longer tokens make it harmless; heads that are read one by one say what they would need."""
    target = KINDS[kind]()
    noisy = oracle.Noisy(target, 1e-2, fresh=fresh)
    result = extract.Auto()(noisy)
    assert result.status is Status.RECOVERED, result.reason
    questions = torch.randn(
        16, 3, target.dim, generator=torch.Generator().manual_seed(5)
    ).double()
    assert torch.allclose(
        result.model(questions), target(questions), rtol=1e-6, atol=1e-6
    )
    exact = extract.MultiHead()(noisy)
    assert exact.status is Status.UNVERIFIED
    assert "rounded or noisy" in exact.reason


def test_a_fit_says_how_well_it_is_known():
    """Twice the error of the answers is twice that of the model, and more answers mean less."""
    head = oracle.plant("head", dim=3, seed=1)
    stream = torch.Generator().manual_seed(2)
    X = torch.randn(80, 3, 3, generator=stream, dtype=torch.float64)
    fresh = torch.randn(5, 3, 3, generator=stream, dtype=torch.float64)
    error = torch.full((80,), 1e-3, dtype=torch.float64)
    once, twice, half = (
        uncertainty(head, ("W", "v"), [(X[:n], head(X[:n]), e[:n])])(fresh)
        for n, e in ((80, error), (80, 2 * error), (40, error))
    )
    assert torch.allclose(twice, 2 * once)
    assert bool((half > once).all())
    # A model fitted to answers with such errors is off by about as much.
    noise = torch.randn(80, generator=stream, dtype=torch.float64) * error
    fitted = refined(head, ("W", "v"), [(X, head(X) + noise, error)])
    assert bool(((fitted(fresh) - head(fresh)).abs() <= 4 * once).all())


def test_what_no_heads_explain_is_a_mismatch():
    class Cubic:
        dim = 3

        def __call__(self, sequences):
            return sequences.sum((1, 2)) ** 3

    result = extract.Fitted(most=1, starts=2)(Cubic())
    assert result.status is Status.MISMATCH
    assert "answers to single tokens are not linear" in result.reason
    two = oracle.plant("multi-head", dim=4, heads=2, seed=1)
    result = extract.Fitted(heads=1, starts=2)(two)
    assert result.status is Status.MISMATCH
    assert "1 heads leave residuals" in result.reason


def test_what_never_changes_gives_nothing_away():
    class Constant:
        dim = 3

        def __call__(self, sequences):
            return torch.full((len(sequences),), 2.5, dtype=torch.float64)

    result = extract.Auto()(Constant())
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "every answer is the same" in result.reason
