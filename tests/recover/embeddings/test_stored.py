"""Stored forms of a vector: the misfit against naive sums, and a test that chance seldom fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from keyhole.core.errors import InputError
from keyhole.recover.embeddings.judge import Stored
from keyhole.recover.layers.precision import FLOAT32
from keyhole.recover.leaks import Pooled

STREAM = torch.Generator().manual_seed(0)
WIDTH = 64
BOOK = torch.randn(8, 16, 8, generator=STREAM) / 8


def unit(count=1):
    vectors = torch.randn(count, WIDTH, generator=STREAM, dtype=torch.float64)
    return torch.nn.functional.normalize(vectors, dim=-1)


def in_codes(vector):
    codes = reference.nearest_codes(vector.numpy(), BOOK.numpy())
    return torch.cat([BOOK[block, code] for block, code in enumerate(codes)])


def in_steps(vector, most=127):
    step = vector.abs().max() / most
    return ((vector / step).round() * step).float()


FORMS = {
    "float32": lambda f: Pooled(f.float()),
    "float16": lambda f: Pooled(f.half()),
    "bfloat16": lambda f: Pooled(f.bfloat16().float()),
    "int8": lambda f: Pooled(in_steps(f)),
    "int4": lambda f: Pooled(in_steps(f, 7)),
    "binary": lambda f: Pooled(f.sign().float()),
    "steps": lambda f: Pooled(
        (f * 90).round().float() / 90, steps=torch.full((WIDTH,), 1 / 90)
    ),
    "codes": lambda f: Pooled(in_codes(f), codebook=BOOK),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_inferred_or_stated(form):
    f = unit()[0]
    assert Stored.of(FORMS[form](f), f).name == form


def test_bits_of_zero_and_one_are_signs_too():
    f = unit()[0]
    stored = Stored.of(Pooled((f > 0).float()), f)
    assert stored.name == "binary"
    assert torch.equal(stored.values, f.sign())
    assert stored.bits == WIDTH


@pytest.mark.parametrize("form", ["float16", "int8", "int4", "binary", "steps"])
def test_a_wide_cell_is_as_likely_as_its_normal_integral(form):
    f = unit()[0]
    stored = Stored.of(FORMS[form](f), f)
    near = f + 0.5 * stored.error * torch.randn(
        WIDTH, generator=STREAM, dtype=torch.float64
    )
    low = stored.values - stored.widths / 2
    high = stored.values + stored.widths / 2
    if form == "binary":
        low = torch.where(f > 0, 0.0, -torch.inf)
        high = torch.where(f > 0, torch.inf, 0.0)
    kept = stored.widths > 4 * stored.error
    part = Stored(stored.name, stored.values[kept], stored.widths[kept], stored.error)
    near = near[kept]
    low = low[kept]
    high = high[kept]
    truth = reference.cell_misfit(near.numpy(), low.numpy(), high.numpy(), stored.error)
    assert float(part.misfit(near[None])) == pytest.approx(truth, rel=2e-3, abs=2e-3)


def test_a_step_smaller_than_the_error_only_adds_to_it():
    f = unit()[0]
    noise = 0.02
    leak = Pooled(in_steps(f), noise=noise)
    stored = Stored.of(leak, f)
    step = float(f.abs().max()) / 127
    unit_ = noise**2 + step**2 / 12 + (FLOAT32 * float(f.square().mean().sqrt())) ** 2
    truth = sum(
        (float(y) - float(x)) ** 2 / unit_ for y, x in zip(leak.values, f, strict=True)
    )
    assert float(stored.misfit(f[None])) == pytest.approx(truth, rel=1e-3)


def test_numbers_beyond_the_ends_are_clipped():
    f = unit()[0]
    ends = torch.stack([torch.full((WIDTH,), -0.1), torch.full((WIDTH,), 0.1)])
    steps = torch.full((WIDTH,), 0.2 / 255)
    values = (ends[0] + ((f.clamp(-0.1, 0.1) + 0.1) / steps).round() * steps).float()
    assert float(f.abs().max()) > 0.15
    shut, open_ = (
        Stored.of(Pooled(values, steps=steps, ends=e), f) for e in (None, ends)
    )
    assert float(shut.misfit(f[None])) > shut.limit(f)
    assert float(open_.misfit(f[None])) <= open_.limit(f)
    inside = f.abs() < 0.09
    off = torch.where(inside, f + 2 * steps, f)
    assert float(open_.misfit(off[None])) > open_.limit(off)


def test_codes_are_those_of_the_nearest_centroids():
    f, other = unit(2)
    stored = Stored.of(FORMS["codes"](f), f)
    assert stored.codes.tolist() == reference.nearest_codes(f.numpy(), BOOK.numpy())
    same = map(int.__eq__, stored.codes.tolist(), reference.nearest_codes(other, BOOK))
    assert f"{sum(same)} of 8 codes agree" in stored.agreement(other)
    assert stored.bits == 8 * 4
    assert float(stored.misfit(f[None])) < 1
    assert float(stored.misfit(other[None])) > 1e3


def test_a_vector_that_is_not_of_the_codebook_is_refused():
    f = unit()[0]
    with pytest.raises(InputError, match="of the codebook's centroids"):
        Stored.of(Pooled(f.float(), codebook=BOOK), f).misfit(f[None])


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
def test_the_right_vector_fits_and_another_does_not(form, share):
    """The noise is 10% of the spread and stated, or none. A refusal has odds of e⁻¹⁰ : 1."""
    noise = share / WIDTH**0.5
    for f in unit(60):
        loud = f + noise * torch.randn(WIDTH, generator=STREAM, dtype=torch.float64)
        leak = FORMS[form](loud)
        leak = Pooled(
            leak.values,
            noise=noise or None,
            steps=leak.steps,
            codebook=leak.codebook,
            precision=leak.precision,
        )
        stored = Stored.of(leak, f)
        assert float(stored.misfit(f[None])) <= stored.limit(f)
        off = unit()[0]
        assert float(stored.misfit(off[None])) > stored.limit(off)
        near = stored.nearest(off)[None]  # at its borders, or 4.5 deviations off
        assert (
            float(stored.misfit(near))
            < 0.05 * float(stored.misfit(off[None])) + 4.5**2 * WIDTH
        )
        if not noise:
            assert torch.equal(stored.nearest(f), f)


def test_bits_are_at_most_what_shannon_allows():
    f = unit()[0]
    spread = float((f - f.mean()).square().mean())
    for noise in (0.01, 0.05):
        stored = Stored.of(Pooled(f.float(), noise=noise), f)
        truth = sum(np.log2(1 + spread / noise**2) / 2 for _ in range(WIDTH))
        assert stored.bits == pytest.approx(truth, rel=1e-3)
    fine, coarse = (Stored.of(FORMS[form](f), f).bits for form in ("int8", "int4"))
    assert (
        coarse + 3.5 * WIDTH < fine < coarse + 4.5 * WIDTH
    )  # a factor of 127/7 in the step


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": 5}, "width is 5, but the vector has 64 numbers"),
        ({"steps": torch.ones(5)}, "64 numbers need 64 steps, not"),
        ({"steps": -torch.ones(64)}, "steps must not be negative"),
        ({"steps": torch.full((64,), torch.nan)}, "steps must be finite"),
        ({"ends": torch.ones(2, 64)}, r"ends need steps and shape \(2, 64\)"),
        ({"codebook": torch.ones(3, 4, 5)}, "a codebook must have shape .* being 64"),
        (
            {"codebook": BOOK, "steps": torch.ones(64)},
            "give steps or a codebook, not both",
        ),
    ],
)
def test_stated_forms_must_fit_the_vector(given, words):
    with pytest.raises(InputError, match=words):
        Pooled(unit()[0].float(), **given)
