"""A leak made on purpose: what a model would give away for a text, in the state it leaks in.

Leaks in practice are not float32: caches are kept in bfloat16 or in 8 bits with a scale for each
token and head, an endpoint adds noise. Hidden states come as directions (vLLM's token embeddings
are rows of length one), cut to their first numbers, some rows of them, or in an order that is not
the text's. `leak_of` runs the model and takes one exposure of a text; `degrade` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_number
from keyhole.data import opening
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.models.loading import identity
from keyhole.recover.base_leak import PRECISIONS
from keyhole.recover.leaks import TYPES, HiddenStates, Leak, Logits, Pooled
from keyhole.recover.scrambled import FORMS as SECRET_FORMS
from keyhole.recover.scrambled import hidden_behind
from keyhole.recover.solvable import expect_numbers

FORMS = {
    "normalised": "normalised", "permuted": "permuted", "subset": "subset:K",
    "truncated": "truncated:K", "log-probabilities": "log-probabilities",
    **{name: f"{name}:KEY" for name in SECRET_FORMS},
}  # fmt: skip
LONGEST = 512  # tokens of a text that a leak is made of


def leak_of(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[int],
    exposure: Exposure | str,
    *,
    most: int = LONGEST,
) -> Leak:
    """One exposure of one text (or of its token ids), in float32, with the model's identity in it.

    A text is cut off after `most` tokens; ids are taken as they are.
    """
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    parts = anatomy(model)
    exposure.block(parts)
    ids = text
    if isinstance(text, str):
        most = min(most, parts.max_length)
        ids = tokenizer(opening(text, most), truncation=True, max_length=most)["input_ids"]
        if ids == tokenizer("")["input_ids"]:  # nothing, or the tokenizer's frame around nothing
            raise InputError(f"expected a text with a token in it, got {text[:40]!r}")
    if not ids:
        raise InputError("expected one token or more, got none")
    with torch.no_grad():
        given = capture(model, exposure, ids=torch.tensor([ids], device=parts.device))
    expect_numbers(model, given.values())
    tensors = {name: tensor[0].cpu() for name, tensor in given.items()}
    about: dict[str, Any] = {"model": identity(model)}
    if exposure.kind == "pooled":
        about |= {"pooling": exposure.pooling, "normalised": exposure.normalised}
        about["tokens"] = len(ids)
    elif exposure.kind == "logits":
        about |= {"log_probabilities": exposure.log_probabilities, "tokens": len(ids)}
    else:
        about["layer"] = exposure.layer
    return TYPES[exposure.kind](**tensors, **about)


def degrade(
    leak: Leak,
    precision: str = "float32",
    noise: float = 0.0,
    seed: int | torch.Generator = 0,
    forms: Sequence[str] = (),
) -> Leak:
    """The leak in other forms, with noise of `noise` times its standard deviation, then rounded.

    `forms` are any of `truncated:K` (the first K numbers of each row), `normalised` (each row
    divided by its length, after it was cut), `subset:K` (K rows, the others NaN) and `permuted`
    (rows in any order), of hidden states; the first two of a pooled embedding too; or
    `log-probabilities`, of logits. `rotated:KEY`, `scrambled:KEY` and `mixed:KEY` (scrambled.py),
    of hidden states or keys and values, come last, under a secret that is drawn from the whole
    number KEY: texts of one KEY share it. The others and the precision are written into the leak,
    as a server's documentation and a file's dtype would tell; secrets and the noise are not.
    """
    changes = parse_forms(forms)
    secrets = {name: changes.pop(name) for name in SECRET_FORMS if name in changes}
    if len(secrets) > 1:
        raise InputError(f"expected one secret, got {' and '.join(secrets)}")
    if precision not in PRECISIONS:
        raise InputError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision}")
    if not 0.0 <= noise < float("inf"):
        raise InputError(f"expected noise of 0 or more, got {noise}")
    stream = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    leak = _reshaped(leak, changes, stream)
    for form, key in secrets.items():
        leak = hidden_behind(leak, form, key or 0, stream)
    changed: dict[str, Tensor] = {}
    for name, tensor in leak.tensors.items():
        if noise:
            spread = tensor[tensor.isfinite()].std()
            tensor = tensor + noise * spread * torch.randn(tensor.shape, generator=stream)
        changed[name] = _ROUNDINGS[precision](tensor)
    return replace(leak, **changed, precision=precision)


def with_noise(leak: Leak, noise: float) -> Leak:
    """The leak, with noise of `noise` times its standard deviation stated to be in it."""
    expect_number("noise", noise, least=0)
    numbers = torch.cat([tensor.flatten() for tensor in leak.tensors.values()])
    spread = float(numbers[numbers.isfinite()].std()) / (1 + noise**2) ** 0.5  # without the noise
    return replace(leak, noise=noise * spread)


def parse_forms(forms: Sequence[str]) -> dict[str, int | None]:
    """What each of `normalised`, `subset:K` and the others asks for, once at most."""
    parsed: dict[str, int | None] = {}
    for form in forms:
        name, colon, count = form.partition(":")
        counted = name in ("subset", "truncated", *SECRET_FORMS)
        whole = count.isascii() and count.isdecimal() and 0 < len(count) < 10 and int(count) > 0
        if name not in FORMS or bool(colon) != counted or (counted and not whole):
            raise InputError(f"expected a form among {', '.join(FORMS.values())}, got {form}")
        if name in parsed:
            raise InputError(f"expected each form once, got {name} twice")
        parsed[name] = int(count) if counted else None
    return parsed


def _reshaped(leak: Leak, forms: dict[str, int | None], stream: torch.Generator) -> Leak:
    if not forms:
        return leak
    if isinstance(leak, Logits) and set(forms) == {"log-probabilities"}:
        return replace(leak, values=leak.values.log_softmax(-1), log_probabilities=True)
    if "log-probabilities" in forms:
        raise InputError(f"expected logits to be {', '.join(forms)}, got {leak.exposure}")
    of_rows = [form for form in forms if form in ("subset", "permuted")]
    if not isinstance(leak, HiddenStates | Pooled) or (isinstance(leak, Pooled) and of_rows):
        wrong = of_rows if isinstance(leak, Pooled) else forms
        raise InputError(f"expected hidden states to be {', '.join(wrong)}, got {leak.exposure}")
    values, about = leak.values, {}
    width = forms.get("truncated")
    if width is not None:
        if width > values.shape[-1]:
            raise InputError(f"expected at most {values.shape[-1]} numbers of a row, got {width}")
        values, about = values[..., :width], {"width": width}
    if "normalised" in forms:
        values = torch.nn.functional.normalize(values, dim=-1)
        about["normalised"] = True
    rows = forms.get("subset")
    if rows is not None:
        kept = torch.zeros(len(values), dtype=torch.bool)
        kept[torch.randperm(len(values), generator=stream)[:rows]] = True
        values = values.where(kept[:, None], torch.nan)
    if "permuted" in forms:
        values = values[torch.randperm(len(values), generator=stream)]
        about["permuted"] = True
    return replace(leak, values=values, **about)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype).float()


def _steps(most: int) -> Callable[[Tensor], Tensor]:
    """A whole number of steps from −most to most, with one step for each row."""

    def rounded(tensor: Tensor) -> Tensor:
        step = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
        return (tensor / step).round() * step

    return rounded


_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": _as(torch.float32),
    "bfloat16": _as(torch.bfloat16),
    "float16": _as(torch.float16),
    "int8": _steps(127),
    "int4": _steps(7),
    "binary": lambda tensor: torch.where(tensor > 0, 1.0, -1.0),
}
