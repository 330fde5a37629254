"""Leaks for experiments: `leak_of` runs a model on a text, `degrade` makes the leak less exact.

Leaks in practice are not float32. Caches are kept in bfloat16, or in 8 bits with a
scale for each token and head; an endpoint may add noise. Hidden states may be
normalised to length one (vLLM's token embeddings), cut to their first numbers,
incomplete, or in another order than the text's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_among, expect_number, expect_seed
from keyhole.core.files import unwritable
from keyhole.data import opening
from keyhole.models.anatomy import anatomy, expect_numbers
from keyhole.models.capture import Exposure
from keyhole.models.capture import capture as exposed
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded, identity
from keyhole.models.pairs import behind, decoder_of
from keyhole.recover.leaks import PRECISIONS, TYPES, HiddenStates, Leak, Logits, Pooled
from keyhole.recover.secrets import SECRETS, hidden_by, secrets_of

FORMS = {
    "normalised": "normalised",
    "permuted": "permuted",
    "subset": "subset:K",
    "truncated": "truncated:K",
    "log-probabilities": "log-probabilities",
    **{name: f"{name}:KEY" for name in SECRETS},
}
MAX_LENGTH = 512  # tokens of a text whose leak is simulated


def leak_of(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[int],
    exposure: Exposure | str,
    *,
    max_length: int = MAX_LENGTH,
    encoder: Tensor | None = None,
) -> Leak:
    """Return one exposure of a text (or of token ids) in float32, with the model's identity.

    A text is cut off after `max_length` tokens; ids are not. With states (m, e) of an
    `encoder`, the leak is of the decoder that attends to them.
    """
    if encoder is not None:
        model = decoder_of(model)
        with behind(model, encoder):
            leak = leak_of(model, tokenizer, text, exposure, max_length=max_length)
        return replace(leak, encoder=encoder.float().cpu())
    exposure = Exposure.parse(exposure)
    parts = anatomy(model)
    exposure.block(parts)  # refuses a layer that the model does not have
    ids = text
    if isinstance(text, str):
        ids = token_ids(tokenizer, text, min(max_length, parts.max_length))
    if not ids:
        raise InputError("a text must have at least one token")
    with torch.no_grad():
        leaked = exposed(model, exposure, ids=torch.tensor([ids], device=parts.device))
    expect_numbers(model, leaked.values())
    tensors = {name: tensor[0].cpu() for name, tensor in leaked.items()}
    about: dict[str, Any] = {"model": identity(model)}
    if exposure.kind == "pooled":
        about |= {"pooling": exposure.pooling, "normalised": exposure.normalised}
        about["tokens"] = len(ids)
    elif exposure.kind == "logits":
        about |= {"log_probabilities": exposure.log_probabilities, "tokens": len(ids)}
    else:
        about["layer"] = exposure.layer
    return TYPES[exposure.kind](**tensors, **about)


def token_ids(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """Return the ids of a text, cut off after `max_length` tokens."""
    given = opening(text, max_length)
    ids = tokenizer(given, truncation=True, max_length=max_length)["input_ids"]
    if ids == tokenizer("")["input_ids"]:  # at most special tokens
        raise InputError(f"a text must have at least one token: {text[:40]!r}")
    return ids


def degrade(
    leak: Leak,
    precision: str = "float32",
    noise: float = 0.0,
    seed: int | torch.Generator = 0,
    forms: Sequence[str] = (),
) -> Leak:
    """Return the leak in other forms, with added noise, rounded to `precision`.

    The noise is `noise` times the leak's standard deviation. The `forms` are applied in
    this order:

    - of hidden states and pooled embeddings: `truncated:K` keeps the first K numbers of each row,
      `normalised` divides each row by its length
    - of hidden states: `subset:K` keeps K rows and makes the others NaN, `permuted` shuffles rows
    - of logits: `log-probabilities`
    - of keys and values: one secret, `rotated:KEY`, `shielded:KEY` or `cloaked:KEY` (secrets.py);
      the first of hidden states too. It is drawn from the whole number KEY: texts share
      it.

    The leak states its forms and its precision, as a server's documentation and a
    file's dtype would. It states neither the secret nor the noise.
    """
    changes = parse_forms(forms)
    secrets = {name: changes.pop(name) for name in SECRETS if name in changes}
    if len(secrets) > 1:
        raise InputError(f"give one secret, not {' and '.join(secrets)}")
    expect_among("precision", precision, PRECISIONS)
    expect_number("noise", noise, least=0)
    if isinstance(seed, torch.Generator):
        stream = seed
    else:
        stream = torch.Generator().manual_seed(seed)
    leak = _reshaped(leak, changes, stream)
    for form, key in secrets.items():
        leak = hidden_by(secrets_of(leak, form, key or 0, stream), leak)
    changed: dict[str, Tensor] = {}
    for name, tensor in leak.tensors.items():
        if noise:
            spread = tensor[tensor.isfinite()].std()
            tensor = tensor + noise * spread * torch.randn(
                tensor.shape, generator=stream
            )
        changed[name] = ROUNDINGS[precision](tensor)
    return replace(leak, **changed, precision=precision)


def parse_forms(forms: Sequence[str]) -> dict[str, int | None]:
    """Return the number, if any, that each form carries, by the form's name."""
    parsed: dict[str, int | None] = {}
    for form in forms:
        name, colon, count = form.partition(":")
        counted = name in ("subset", "truncated", *SECRETS)
        whole = (
            count.isascii()
            and count.isdecimal()
            and 0 < len(count) < 10
            and int(count) > 0
        )
        if name not in FORMS or bool(colon) != counted or (counted and not whole):
            raise InputError(
                f"unknown form {form}: choose one of {', '.join(FORMS.values())}"
            )
        if name in parsed:
            raise InputError(f"form {name} is given twice")
        parsed[name] = int(count) if counted else None
    return parsed


def _reshaped(
    leak: Leak, forms: dict[str, int | None], stream: torch.Generator
) -> Leak:
    """Return the leak in all forms that are no secret."""
    if not forms:
        return leak
    if isinstance(leak, Logits) and set(forms) == {"log-probabilities"}:
        return replace(leak, values=leak.values.log_softmax(-1), log_probabilities=True)
    if "log-probabilities" in forms:
        raise InputError(f"only logits can be {', '.join(forms)}, not {leak.exposure}")
    of_rows = [form for form in forms if form in ("subset", "permuted")]
    if not isinstance(leak, HiddenStates | Pooled) or (
        isinstance(leak, Pooled) and of_rows
    ):
        wrong = of_rows if isinstance(leak, Pooled) else forms
        raise InputError(
            f"only hidden states can be {', '.join(wrong)}, not {leak.exposure}"
        )
    values = leak.values
    about = {}
    width = forms.get("truncated")
    if width is not None:
        if width > values.shape[-1]:
            raise InputError(
                f"truncated:{width} exceeds the {values.shape[-1]} numbers of a row"
            )
        values = values[..., :width]
        about = {"width": width}
        if isinstance(leak, Pooled):
            about["unit"] = "normalised" in forms
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
    """Return a rounding to whole steps from −most to most, with one step for each row."""

    def rounded(tensor: Tensor) -> Tensor:
        step = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
        return (tensor / step).round() * step

    return rounded


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": _as(torch.float32),
    "bfloat16": _as(torch.bfloat16),
    "float16": _as(torch.float16),
    "int8": _steps(127),
    "int4": _steps(7),
    "binary": lambda tensor: torch.where(tensor > 0, 1.0, -1.0),
}


def capture(
    model: str | Loaded,
    texts: str | Sequence[str],
    expose: str | Exposure,
    *,
    out: str | Path = "leak.safetensors",
    precision: str = "float32",
    noise: float = 0.0,
    forms: Sequence[str] = (),
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
    notify: Callable[[Path, Leak], None] | None = None,
) -> list[Path]:
    """Run a model on texts, and write their leaks to files for an attacker.

    `expose` is `hidden:3`, `kv:0`, `maps:1`, `attention:1`, `pooled` or `logits`. `out`
    is a file, or a folder for several texts. `precision`, `noise` and `forms` are those
    of `degrade`. `notify` gets each file and its leak.
    """
    expect_seed(seed)
    parse_forms(forms)
    exposure = Exposure.parse(expose)
    texts = [texts] if isinstance(texts, str) else list(texts)
    paths = files_of(Path(out), len(texts))
    task = "causal" if exposure.kind == "logits" else "base"
    model = open_model(model, task, device, allow_pickle)
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise unwritable(paths[0].parent, error) from error
    for number, (text, path) in enumerate(zip(texts, paths, strict=True)):
        leak = leak_of(model.model, model.tokenizer, text, exposure)
        leak = degrade(leak, precision, noise, seed + number, forms)
        leak.save(path)
        if notify is not None:
            notify(path, leak)
    return paths


def files_of(out: Path, count: int) -> list[Path]:
    """Return the files that `count` leaks are written to."""
    if count == 0:
        raise InputError("no text was given")
    if count == 1:
        return [out]
    if out.suffix:
        raise InputError(f"{count} leaks need a folder, not a file: {out}")
    return [out / f"leak-{number:04d}.safetensors" for number in range(count)]
