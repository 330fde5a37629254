"""Leaks for experiments: `leak_of` runs a model on a text, `degrade` makes the leak less exact.

Leaks in practice are not float32. Caches are kept in bfloat16, or in 8 bits with a
scale for each token and head; an endpoint may add noise. Hidden states may be
normalised to length one (vLLM's token embeddings), cut to their first numbers,
incomplete, or in another order than the text's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_among, expect_seed
from keyhole.core.files import unwritable
from keyhole.core.float64 import random_stream
from keyhole.data import opening
from keyhole.defence import Changes, Defence
from keyhole.models.anatomy import anatomy, expect_numbers
from keyhole.models.capture import Exposure
from keyhole.models.capture import capture as exposed
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded, identity
from keyhole.models.pairs import behind, decoder_of
from keyhole.recover.leaks import PRECISIONS, TYPES, Leak, Pooled
from keyhole.recover.secrets import SECRETS, hidden_by, secrets_of

MAX_LENGTH = 512  # tokens of a text whose leak is simulated
# Forms in the order in which they are applied, and how they are written.
FORMS = {
    "truncated": "truncated:K",
    "normalised": "normalised",
    "subset": "subset:K",
    "permuted": "permuted",
    "log-probabilities": "log-probabilities",
    **{name: f"{name}:KEY" for name in SECRETS},
}
_POSSIBLE = {  # for a kind of leak, besides secrets
    "hidden": ("truncated", "normalised", "subset", "permuted"),
    "pooled": ("truncated", "normalised"),
    "logits": ("log-probabilities",),
}


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


def token_ids(
    tokenizer: Any,
    text: str,
    max_length: int,
) -> list[int]:
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
    stream = seed if isinstance(seed, torch.Generator) else random_stream(seed)
    expect_among("precision", precision, PRECISIONS)
    states = Changes.STATES
    defence = Defence(
        changes=states, noise=noise, forms=tuple(forms), precision=precision
    )
    return defended(leak, defence, stream)


def defended(
    leak: Leak,
    defence: Defence,
    stream: torch.Generator,
) -> Leak:
    """Return the leak behind a defence of states."""
    forms = parse_forms(defence.forms)
    possible = (*_POSSIBLE.get(leak.kind, ()), *SECRETS)
    if wrong := [form for form in forms if form not in possible]:
        kind = "logits" if "log-probabilities" in wrong else "hidden states"
        raise InputError(f"only {kind} can be {', '.join(wrong)}, not {leak.exposure}")
    for form, number in forms.items():
        if form in SECRETS:
            leak = hidden_by(secrets_of(leak, form, number, stream), leak)
        else:
            leak = _reshaped(leak, form, number, stream)
    if isinstance(leak, Pooled) and "truncated" in forms:
        leak = replace(leak, unit="normalised" in forms)
    changed = {
        name: defence.change(tensor, stream) for name, tensor in leak.tensors.items()
    }
    return replace(leak, **changed, precision=defence.precision)


def parse_forms(forms: Sequence[str]) -> dict[str, int]:
    """Return the number that each form carries (or 0) by name, in the order of FORMS."""
    parsed: dict[str, int] = {}
    for form in forms:
        name, colon, number = form.partition(":")
        counted = ":" in FORMS.get(name, "")
        whole = re.fullmatch("0*[1-9][0-9]{0,8}", number)
        if name not in FORMS or counted != bool(colon) or counted != bool(whole):
            raise InputError(
                f"unknown form {form}: choose one of {', '.join(FORMS.values())}"
            )
        if name in parsed:
            raise InputError(f"form {name} is given twice")
        parsed[name] = int(number or 0)
    secrets = [name for name in SECRETS if name in parsed]
    if len(secrets) > 1:
        raise InputError(f"give one secret, not {' and '.join(secrets)}")
    return {name: parsed[name] for name in FORMS if name in parsed}


def _reshaped(
    leak: Leak,
    form: str,
    number: int,
    stream: torch.Generator,
) -> Leak:
    """Return the leak in a form that is no secret."""
    values = leak.tensors["values"]
    if form == "truncated":
        width = values.shape[-1]
        if number > width:
            raise InputError(f"truncated:{number} exceeds the {width} numbers of a row")
        return replace(leak, values=values[..., :number], width=number)
    if form == "normalised":
        unit = torch.nn.functional.normalize(values, dim=-1)
        return replace(leak, values=unit, normalised=True)
    if form == "subset":
        kept = torch.zeros(len(values), dtype=torch.bool)
        kept[torch.randperm(len(values), generator=stream)[:number]] = True
        return replace(leak, values=values.where(kept[:, None], torch.nan))
    if form == "permuted":
        order = torch.randperm(len(values), generator=stream)
        return replace(leak, values=values[order], permuted=True)
    return replace(leak, values=values.log_softmax(-1), log_probabilities=True)


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
