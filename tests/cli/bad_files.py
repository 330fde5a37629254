"""Unusable files by name, each of which is made when a test first needs it.

A name says what is wrong. `make(folder, name)` makes the file (or folder, link, device)
of that name in `folder`; names that nothing makes stand for files that do not exist.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save, save_file

import tampered
import tiny_classifiers
import tiny_models
from keyhole import disrupt, harden, invert, oracle, recover
from keyhole.core.files import write_tensors

SEED = 2601
SENTENCE = "a fine film with w1 w2 w3"
_RANDOM = random.Random(SEED).randbytes(4096)


def make(folder: Path, name: str) -> Path:
    """Make the file called `name`, if it can be made."""
    path = folder / name
    maker = MAKERS.get(name)
    if maker is not None and not os.path.lexists(path):
        maker(path)
    return path


def _bytes(data: bytes | str) -> Callable[[Path], None]:
    raw = data.encode() if isinstance(data, str) else data
    return lambda path: path.write_bytes(raw) and None


def _lines(*lines: str) -> Callable[[Path], None]:
    return _bytes("\n".join([*lines, ""]))


def _need(path: Path, name: str) -> Path:
    return make(path.parent, name)


# What takes the place of any file.


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


ANY = {
    "empty": _bytes(b""),
    "binary": _bytes(_RANDOM),
    "folder": Path.mkdir,
    "dangling-link": _link("nowhere-at-all"),
    "link-loop": _link("link-loop"),
    "endless": _link("/dev/zero"),
    "full": _link("/dev/full"),
    "pipe": os.mkfifo,
}

# Targets, problems and leaks.


def _tensors(
    tensors: dict[str, torch.Tensor], about: dict[str, str]
) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path, metadata=about)


_EYE = torch.eye(3, dtype=torch.float64)
_HEAD = {"keyhole": "1", "kind": "head"}


def _claims(shape: list[int], dtype: str = "F64") -> bytes:
    """A header that promises more data than the file has."""
    header = {"W": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 8


def _sparse(path: Path) -> None:
    """A sparse file of 4 TB with a correct header."""
    side = 2**19
    size = 8 * side * side
    parts = {"W": ([side, side], [0, size]), "v": ([side], [size, size + 8 * side])}
    header: dict[str, Any] = {
        name: {"dtype": "F64", "shape": shape, "data_offsets": offsets}
        for name, (shape, offsets) in parts.items()
    }
    text = json.dumps({"__metadata__": _HEAD, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + size + 8 * side)


TARGETS: dict[str, Callable[[Path], None]] = {
    "nan-weights.safetensors": _tensors(
        {"W": _EYE * torch.nan, "v": _EYE[0].clone()}, _HEAD
    ),
    "inf-weights.safetensors": _tensors(
        {"W": _EYE * torch.inf, "v": _EYE[0].clone()}, _HEAD
    ),
    "half-weights.safetensors": _tensors(
        {"W": _EYE.half(), "v": _EYE[0].half()}, _HEAD
    ),
    "int-weights.safetensors": _tensors({"W": _EYE.long(), "v": _EYE[0].long()}, _HEAD),
    "odd-shapes.safetensors": _tensors(
        {"W": _EYE[:2].clone(), "v": _EYE[0].clone()}, _HEAD
    ),
    "no-axis.safetensors": _tensors({"W": _EYE, "v": _EYE.sum()}, _HEAD),
    "no-entries.safetensors": _tensors(
        {"W": torch.ones(0, 0), "v": torch.ones(0)}, _HEAD
    ),
    "no-v.safetensors": _tensors({"W": _EYE}, _HEAD),
    "no-tensors.safetensors": _tensors({}, _HEAD),
    "other-kind.safetensors": _tensors({"W": _EYE}, {"keyhole": "1", "kind": "banana"}),
    "other-version.safetensors": _tensors(
        {"W": _EYE, "v": _EYE[0].clone()}, {**_HEAD, "keyhole": "9"}
    ),
    "other-link.safetensors": _tensors(
        {"W": _EYE, "v": _EYE[0].clone(), "offset": torch.zeros(())},
        {**_HEAD, "link": "cubic"},
    ),
    "nan-offset.safetensors": _tensors(
        {
            "W": _EYE,
            "v": _EYE[0].clone(),
            "offset": torch.tensor(torch.nan, dtype=torch.float64),
        },
        {**_HEAD, "link": "sigmoid"},
    ),
    "wide-offset.safetensors": _tensors(
        {
            "W": _EYE,
            "v": _EYE[0].clone(),
            "offset": torch.zeros(7, 2, dtype=torch.float64),
        },
        {**_HEAD, "link": "softmax"},
    ),
    "flat-layer.safetensors": _tensors(
        {"W": _EYE, "A": _EYE[0].clone(), "w": _EYE[0].clone()},
        {"keyhole": "1", "kind": "one-layer"},
    ),
    "flat-relu.safetensors": _tensors(
        {"A": _EYE[0].clone(), "w": _EYE[0].clone()}, {"keyhole": "1", "kind": "relu"}
    ),
    "scalar-heads.safetensors": _tensors(
        {"W": _EYE.sum(), "v": _EYE.sum()}, {"keyhole": "1", "kind": "multi-head"}
    ),
    "flat-heads.safetensors": _tensors(
        {"W": _EYE[0].clone(), "v": _EYE[0].clone()},
        {"keyhole": "1", "kind": "multi-head"},
    ),
    "promises.safetensors": _bytes(_claims([2**40, 2**40])),
    "overflows.safetensors": _bytes(_claims([2**62, 2**62, 2**62])),
    "negative-shape.safetensors": _bytes(_claims([-1, 3])),
    "odd-dtype.safetensors": _bytes(_claims([1], "F65")),
    "endless-header.safetensors": _bytes(struct.pack("<Q", 2**60) + b"{}"),
    "deep-header.safetensors": _bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "sparse.safetensors": _sparse,
    "cut-off.safetensors": lambda path: (
        path.write_bytes(_need(path, "target.safetensors").read_bytes()[:-40]) and None
    ),
    "cut-header.safetensors": lambda path: (
        path.write_bytes(_need(path, "target.safetensors").read_bytes()[:30]) and None
    ),
}


def _problem(**changes: torch.Tensor) -> Callable[[Path], None]:
    problem, _ = invert.plant(3, 2, seed=SEED)
    tensors = {"W": problem.W, "V": problem.V, "B": problem.B, **changes}
    about = {"keyhole": "1", "kind": "inversion"}
    return lambda path: save_file(tensors, path, metadata=about)


def _numbers(**about: str) -> Callable[[Path], None]:
    problem, _ = invert.plant(3, 2, seed=SEED)
    tensors = {"W": problem.W, "V": problem.V, "B": problem.B}
    return lambda path: save_file(tensors, path, metadata=about)


_W = torch.eye(2, dtype=torch.float64)
PROBLEMS: dict[str, Callable[[Path], None]] = {
    "nan-output.safetensors": _problem(
        B=torch.full((3, 2), torch.nan, dtype=torch.float64)
    ),
    "inf-values.safetensors": _problem(V=_W * torch.inf),
    "nan-maps.safetensors": _problem(
        maps=torch.full((3, 3), torch.nan, dtype=torch.float64)
    ),
    "complex-w.safetensors": _problem(W=_W.to(torch.complex64)),
    "flat-w.safetensors": _problem(W=_W[0].clone()),
    "many-axes.safetensors": _problem(
        W=torch.zeros(1, 1, 1, 1, 1, 2, 2, dtype=torch.float64)
    ),
    "no-output.safetensors": _problem(B=torch.zeros(0, 2, dtype=torch.float64)),
    "wide-output.safetensors": _problem(B=torch.zeros(3, 5, dtype=torch.float64)),
    "flat-output.safetensors": _problem(B=torch.zeros(2, dtype=torch.float64)),
    "small-known.safetensors": _problem(known=torch.zeros(1, 1, dtype=torch.float64)),
    "small-maps.safetensors": _problem(maps=torch.zeros(2, 2, dtype=torch.float64)),
    "nan-tolerance.safetensors": _numbers(tolerance="nan"),
    "word-gamma.safetensors": _numbers(gamma="much"),
    "negative-gamma.safetensors": _numbers(gamma="-1"),
}


def _leak(kind: str = "hidden", **changes: Any) -> Callable[[Path], None]:
    """A leak of the tiny encoder (width 32, 4 heads of 8, 2 layers), with changes."""

    def write(path: Path) -> None:
        about: dict[str, Any] = {"layer": 1}
        tensors = {
            "values": torch.randn(4, 32, generator=torch.Generator().manual_seed(SEED))
        }
        for name, value in changes.items():
            (tensors if isinstance(value, torch.Tensor) else about)[name] = value
        raw = about.pop("raw", None)
        text = json.dumps(about) if raw is None else raw
        save_file(tensors, path, metadata={"keyhole": "1", "leak": kind, "about": text})

    return write


_LEAKED = torch.ones(4, 32)
LEAKS: dict[str, Callable[[Path], None]] = {
    "ints.leak": _leak(values=_LEAKED.long()),
    "bools.leak": _leak(values=_LEAKED.bool()),
    "float8.leak": _leak(values=_LEAKED.to(torch.float8_e4m3fn)),
    "float8-scales.leak": _leak(values=_LEAKED.to(torch.float8_e8m0fnu)),
    "complex.leak": _leak(values=_LEAKED.to(torch.complex64)),
    "number.leak": _leak(values=torch.tensor(1.0)),
    "seven-axes.leak": _leak(values=torch.ones(1, 1, 1, 1, 1, 4, 32)),
    "nothing.leak": _leak(values=torch.ones(0, 32)),
    "no-width.leak": _leak(values=torch.ones(4, 0)),
    "all-nan.leak": _leak(values=_LEAKED * torch.nan),
    "infinite.leak": _leak(values=_LEAKED * torch.inf),
    "wide.leak": _leak(values=torch.ones(4, 33)),
    "long.leak": _leak(values=torch.ones(2000, 32)),
    "layer-99.leak": _leak(layer=99),
    "layer-minus.leak": _leak(layer=-1),
    "layer-huge.leak": _leak(layer=10**30),
    "layer-word.leak": _leak(layer="first"),
    "layer-float.leak": _leak(layer=1.5),
    "layer-none.leak": _leak(layer=None),
    "layer-list.leak": _leak(layer=[1]),
    "no-values.leak": _leak(keys=torch.ones(4, 8, 8)),
    "more-tensors.leak": _leak(more=torch.ones(2)),
    "more-words.leak": _leak(colour="red"),
    "precision.leak": _leak(precision="int3"),
    "precision-list.leak": _leak(precision=[1]),
    "noise-word.leak": _leak(noise="loud"),
    "noise-nan.leak": _leak(raw='{"layer": 1, "noise": NaN}'),
    "noise-minus.leak": _leak(noise=-1.0),
    "model-number.leak": _leak(model=5),
    "model-other.leak": _leak(model="0123456789abcdef"),
    "no-json.leak": _leak(raw="{"),
    "deep-json.leak": _leak(raw="[" * 100_000),
    "list-json.leak": _leak(raw="[1]"),
    "short-mask.leak": _leak(mask=torch.ones(2, dtype=torch.long)),
    "empty-mask.leak": _leak(mask=torch.zeros(4, dtype=torch.long)),
    "nan-mask.leak": _leak(mask=torch.full((4,), torch.nan)),
    "other-kind.leak": _leak("thoughts"),
    "maps-wide.leak": _leak("maps", values=torch.ones(4, 4, 5)),
    "maps-heads.leak": _leak("maps", values=torch.ones(9, 4, 4)),
    "maps-layer-0.leak": _leak("maps", values=torch.ones(4, 4, 4), layer=0),
    "kv-apart.leak": _leak("kv", keys=torch.ones(4, 3, 8), values=torch.ones(4, 4, 8)),
    "kv-flat.leak": _leak("kv", keys=torch.ones(3), values=torch.ones(4, 4, 8)),
    "pooled-wide.leak": _leak("pooled", values=torch.ones(4, 32), raw="{}"),
    "pooled-way.leak": _leak(
        "pooled", values=torch.ones(32), raw='{"pooling": "median"}'
    ),
    "pooled-tokens.leak": _leak("pooled", values=torch.ones(32), raw='{"tokens": -5}'),
    "pooled-many.leak": _leak(
        "pooled", values=torch.ones(32), raw='{"tokens": 1000000000000}'
    ),
    "pooled-half.leak": _leak("pooled", values=torch.ones(32), raw='{"tokens": 2.5}'),
    "pooled-flag.leak": _leak(
        "pooled", values=torch.ones(32), raw='{"normalised": "perhaps"}'
    ),
}

# Texts and examples.

_HEADER = "sentence\tlabel"
DATA: dict[str, Callable[[Path], None]] = {
    "empty.txt": _bytes(b"\n \n"),
    "latin.txt": _bytes("ein schöner Film\n".encode("latin-1")),
    "utf16.tsv": _bytes(f"{_HEADER}\n{SENTENCE}\t1\n".encode("utf-16")),
    "binary.tsv": _bytes(_RANDOM),
    "binary.jsonl": _bytes(_RANDOM),
    "folder.tsv": Path.mkdir,
    "header-only.tsv": _lines(_HEADER),
    "no-columns.tsv": _lines("a\tb", "x\ty"),
    "twice.tsv": _lines("sentence\tsentence\tlabel", f"{SENTENCE}\tno\t1"),
    "twice.csv": _lines("sentence,label,label", f"{SENTENCE},0,1"),
    "twice.jsonl": _lines('{"sentence": "a fine film", "label": 0, "label": 1}'),
    "ragged.tsv": _lines(_HEADER, "a\t1\t2"),
    "huge-field.csv": _bytes(b"sentence,label\n" + b"word " * 200_000 + b",x\n"),
    "open-quote.csv": _lines("sentence,label", '"a fine film,1'),
    "label-word.tsv": _lines(_HEADER, f"{SENTENCE}\tgood"),
    "label-float.tsv": _lines(_HEADER, f"{SENTENCE}\t1.5"),
    "label-1e30.tsv": _lines(_HEADER, f"{SENTENCE}\t1e30"),
    "label-nan.tsv": _lines(_HEADER, f"{SENTENCE}\tnan"),
    "label-minus.tsv": _lines(_HEADER, f"{SENTENCE}\t-1"),
    "label-large.tsv": _lines(_HEADER, f"{SENTENCE}\t7"),
    "label-billion.tsv": _lines(_HEADER, f"{SENTENCE}\t1000000000"),
    "label-huge.tsv": _lines(_HEADER, f"{SENTENCE}\t{10**30}"),
    "label-digits.tsv": _lines(_HEADER, f"{SENTENCE}\t{'9' * 5000}"),
    "label-empty.tsv": _lines(_HEADER, f"{SENTENCE}\t"),
    "label-superscript.tsv": _lines(_HEADER, f"{SENTENCE}\t²"),
    "label-1e30.jsonl": _lines('{"sentence": "a fine film", "label": 1e30}'),
    "label-nan.jsonl": _lines('{"sentence": "a fine film", "label": NaN}'),
    "label-infinite.jsonl": _lines('{"sentence": "a fine film", "label": Infinity}'),
    "label-list.jsonl": _lines('{"sentence": "a fine film", "label": [1]}'),
    "label-null.jsonl": _lines('{"sentence": "a fine film", "label": null}'),
    "text-number.jsonl": _lines('{"sentence": 5, "label": 1}'),
    "numbers.jsonl": _lines("5", "6"),
    "cut-off.jsonl": _lines('{"sentence": "a fine'),
    "deep.jsonl": _lines("[" * 100_000),
    "deep.json": _lines("[" * 100_000),
    "deep-inside.jsonl": _lines(
        '{"sentence": "a fine film", "label": ' + "[" * 100_000
    ),
    "digits.jsonl": _lines('{"sentence": "a fine film", "label": ' + "9" * 5000 + "}"),
    "surrogate.jsonl": _lines('{"sentence": "\\ud800 \\udfff \\ud800", "label": [0]}'),
    "object.json": _lines('{"data": []}'),
    "numbers.json": _lines("[1, 2, 3]"),
    "nulls.json": _lines("[null]"),
    "dream-short.json": _lines('[[["M: hello"], [{"question": "who?"}]]]'),
    "dream-numbers.json": _lines(
        '[[[1, 2], [{"question": "q", "choice": ["a", "b"], "answer": "a"}], 3]]'
    ),
    "choices-one.jsonl": _lines('{"ctx": "c", "endings": ["a"], "label": 0}'),
    "choices-far.jsonl": _lines('{"ctx": "c", "endings": ["a", "b"], "label": 5}'),
    "choices-float.jsonl": _lines('{"ctx": "c", "endings": ["a", "b"], "label": 0.5}'),
    "endings-null.jsonl": _lines('{"ctx": "c", "endings": null, "label": 0}'),
    "endless.tsv": _link("/dev/zero"),
    "pipe.tsv": os.mkfifo,
    "pipe.txt": os.mkfifo,
}
GOOD_DATA: dict[str, Callable[[Path], None]] = {
    "texts.txt": _lines("a fine film", "a bad film", "w1 w2 w3 w4"),
    "dev.tsv": _lines(_HEADER, "a fine film\t1", "a bad film , w1 w2\t0"),
    "nul.txt": _bytes(b"a fine\0film\n"),
    "huge-line.txt": _bytes(b"word " * 2_000_000 + b"\n"),
    "long.tsv": _lines(_HEADER, f"{'w1 w2 ' * 2000}\t1"),
}

# Models: the tiny classifier's folder, but for what is wrong with it.


def _classifier(path: Path) -> None:
    model = tiny_classifiers.model(labels=2, max_position_embeddings=80).eval()
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)


def _decoder(path: Path) -> None:
    config = tiny_models.model("gpt2").config
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    tiny_models.tokenizer(causal=True).save_pretrained(path)


def _damaged(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.copytree(_need(path, "classifier"), path)
        change(path)

    return write


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return _damaged(change)


def _cut(file: str) -> Callable[[Path], None]:
    return _damaged(
        lambda path: os.truncate(path / file, (path / file).stat().st_size // 2)
    )


def _replaced(file: str, data: bytes) -> Callable[[Path], None]:
    return _damaged(lambda path: (path / file).write_bytes(data))


def _special(file: str, put: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / file).unlink()
        put(path / file)

    return _damaged(change)


MODELS: dict[str, Callable[[Path], None]] = {
    "cut-weights": _cut("model.safetensors"),
    "cut-config": _cut("config.json"),
    "cut-tokenizer": _cut("tokenizer.json"),
    "garbage-weights": _replaced("model.safetensors", _RANDOM),
    "garbage-config": _replaced("config.json", _RANDOM),
    "garbage-tokenizer": _replaced("tokenizer.json", _RANDOM),
    "list-config": _replaced("config.json", b"[1, 2]"),
    "deep-config": _replaced("config.json", b"[" * 100_000),
    "no-weights": _damaged(lambda path: (path / "model.safetensors").unlink()),
    "no-config": _damaged(lambda path: (path / "config.json").unlink()),
    "no-tokenizer": _damaged(
        lambda path: [file.unlink() for file in path.glob("*token*")]
    ),
    "pipe-weights": _special("model.safetensors", os.mkfifo),
    "endless-config": _special(
        "config.json", lambda path: path.symlink_to("/dev/zero")
    ),
    "looped-config": _special(
        "config.json", lambda path: path.symlink_to("config.json")
    ),
    "pickled-garbage": _damaged(
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin")
    ),
    "other-type": _config(model_type="banana"),
    "no-type": _config(model_type=None),
    "no-heads": _config(num_attention_heads=0),
    "odd-heads": _config(num_attention_heads=5),
    "minus-width": _config(hidden_size=-32),
    "wide": _config(hidden_size=64),
    "huge-width": _config(hidden_size=2**40, intermediate_size=2**40),
    "many-words": _config(vocab_size=10**12),
    "many-layers": _config(num_hidden_layers=10**7),
    "word-width": _config(hidden_size="wide"),
    "nan-epsilon": _config(layer_norm_eps="nan"),
    "odd-activation": _config(hidden_act="wiggle"),
    "odd-architectures": _config(architectures=5),
    "odd-classes": _config(id2label={"zero": 1}, label2id={}),
}

# What a stopped run left behind, and what became of it.


def _journal(path: Path) -> None:
    disrupt.run("demo", method="random", examples=1, resume=path)


def _changed(
    name: str, change: Callable[[list[str]], list[str]]
) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        lines = _need(path, name).read_text().splitlines()
        path.write_text("\n".join(change(lines)) + "\n")

    return write


def _edited(name: str, number: int, **changes: Any) -> Callable[[Path], None]:
    def change(lines: list[str]) -> list[str]:
        lines[number] = json.dumps({**json.loads(lines[number]), **changes})
        return lines

    return _changed(name, change)


def _journals(name: str) -> dict[str, Callable[[Path], None]]:
    stem = name.removesuffix(".jsonl")
    return {
        f"{stem}-garbage-line.jsonl": _changed(name, lambda lines: [*lines, "]]]"]),
        f"{stem}-number-line.jsonl": _changed(name, lambda lines: [*lines, "5"]),
        f"{stem}-no-key.jsonl": _changed(name, lambda lines: [*lines, "{}"]),
        f"{stem}-odd-key.jsonl": _edited(name, -1, key=5),
        f"{stem}-deep-line.jsonl": _changed(
            name, lambda lines: [*lines, "[" * 100_000]
        ),
        f"{stem}-other-run.jsonl": _edited(name, 0, model="0123456789abcdef"),
        f"{stem}-more-settings.jsonl": _edited(name, 0, colour="red"),
        f"{stem}-no-head.jsonl": _changed(name, lambda lines: lines[1:]),
        f"{stem}-list-head.jsonl": _changed(name, lambda lines: ["[]", *lines[1:]]),
        f"{stem}-latin.jsonl": lambda path: (
            path.write_bytes(_need(path, name).read_bytes() + b'{"key": "\xe4"}\n')
            and None
        ),
    }


def _outcome(**changes: Any) -> Callable[[Path], None]:
    def change(lines: list[str]) -> list[str]:
        record = json.loads(lines[1])
        record["outcome"] = {**record["outcome"], **changes}
        return [lines[0], json.dumps(record)]

    return _changed("flips.jsonl", change)


JOURNALS: dict[str, Callable[[Path], None]] = {
    **_journals("flips.jsonl"),
    "flips-no-outcome.jsonl": _edited("flips.jsonl", -1, outcome=None),
    "flips-list-outcome.jsonl": _edited("flips.jsonl", -1, outcome=[1, 2]),
    "flips-word-seconds.jsonl": _edited("flips.jsonl", -1, seconds="many"),
    "flips-word-control.jsonl": _edited("flips.jsonl", -1, control="none"),
    "flips-word-change.jsonl": _edited(
        "flips.jsonl", -1, control={"change": "x", "own": 0.0, "flips": 0}
    ),
    "flips-odd-cut.jsonl": _outcome(cut=5),
    "flips-odd-units.jsonl": _outcome(cut=[[1]]),
    "flips-word-units.jsonl": _outcome(cut=[["a", "b", "c", "d", "e"]]),
    "flips-odd-before.jsonl": _outcome(before="abc"),
    "flips-odd-right.jsonl": _outcome(right="perhaps"),
    "flips-odd-share.jsonl": _outcome(share="all"),
    **_journals("read.jsonl"),
    "read-odd-status.jsonl": _edited("read.jsonl", -1, status="splendid"),
    "read-odd-ids.jsonl": _edited("read.jsonl", -1, ids="abc"),
    "read-word-ids.jsonl": _edited("read.jsonl", -1, ids=["a"]),
    "read-far-ids.jsonl": _edited("read.jsonl", -1, ids=[10**12]),
    "read-odd-marks.jsonl": _edited("read.jsonl", -1, marks=["splendid"]),
    "read-odd-seconds.jsonl": _edited("read.jsonl", -1, seconds="many"),
    "read-odd-text.jsonl": _edited("read.jsonl", -1, text=5),
    "read-no-format.jsonl": _edited("read.jsonl", -1, format=None),
}


def _epochs(path: Path) -> None:
    harden.run(
        str(_need(path, "classifier")),
        _need(path, "dev.tsv"),
        path.parent / "epochs-model",
        method="plain",
        epochs=1,
        max_length=60,
        checkpoint=path,
    )


def _epoch(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.copytree(_need(path, "epochs"), path)
        change(path / "epoch-1")

    return write


def _record(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "run.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return _epoch(change)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "epochs-cut-weights": _epoch(
        lambda path: os.truncate(path / "weights.safetensors", 1000)
    ),
    "epochs-other-weights": _epoch(
        lambda path: (path / "weights.safetensors").write_bytes(save({"W": _EYE}))
    ),
    "epochs-no-weights": _epoch(lambda path: (path / "weights.safetensors").unlink()),
    "epochs-cut-optimizer": _epoch(
        lambda path: os.truncate(path / "optimizer.pt", 1000)
    ),
    "epochs-garbage-optimizer": _epoch(
        lambda path: (path / "optimizer.pt").write_bytes(_RANDOM)
    ),
    "epochs-other-optimizer": _epoch(
        lambda path: torch.save({"a": 1}, path / "optimizer.pt")
    ),
    "epochs-no-optimizer": _epoch(lambda path: (path / "optimizer.pt").unlink()),
    "epochs-no-record": _epoch(lambda path: (path / "run.json").unlink()),
    "epochs-cut-record": _epoch(lambda path: os.truncate(path / "run.json", 100)),
    "epochs-pipe-record": _epoch(
        lambda path: ((path / "run.json").unlink(), os.mkfifo(path / "run.json"))
    ),
    "epochs-odd-losses": _record(losses="low"),
    "epochs-no-losses": _record(losses=None),
    "epochs-odd-step": _record(step="last"),
    "epochs-other-run": _record(run={}),
    "epochs-file": _epoch(lambda path: (shutil.rmtree(path), path.write_text("x"))),
    "epochs-huge-number": _epoch(
        lambda path: path.rename(path.with_name(f"epoch-{'9' * 30}"))
    ),
}


def _sqlite(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    connection.close()


def _remembered(path: Path) -> None:
    target = oracle.load(_need(path, "target.safetensors"))
    with oracle.Ledger(target, path) as ledger:
        ledger(torch.ones(2, 2, target.dim, dtype=torch.float64))


def _ledger(statement: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        _remembered(path)
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return write


def _cut_ledger(path: Path) -> None:
    _remembered(path)
    os.truncate(path, 5000)


LEDGERS: dict[str, Callable[[Path], None]] = {
    "other.db": _sqlite,
    "cut-off.db": _cut_ledger,
    "other-target.db": _ledger("UPDATE meta SET value = 'x' WHERE name = 'target'"),
    "no-meta.db": _ledger("DROP TABLE meta"),
    "no-answers.db": _ledger("DROP TABLE answers"),
}


def _good_leak(path: Path) -> None:
    recover.capture(str(_need(path, "classifier")), "w1 w2 w3", "hidden:1", out=path)


def _read(path: Path) -> None:
    recover.run(str(_need(path, "classifier")), _need(path, "good.leak"), out=path)


MAKERS: dict[str, Callable[[Path], None]] = {
    **ANY,
    **TARGETS,
    **PROBLEMS,
    **LEAKS,
    **DATA,
    **GOOD_DATA,
    **MODELS,
    **JOURNALS,
    **CHECKPOINTS,
    **LEDGERS,
    **{name: _bytes(audit.text) for name, audit in tampered.AUDITS.items()},
    "target.safetensors": lambda path: oracle.save(
        oracle.plant(dim=3, seed=SEED), path
    ),
    "problem.safetensors": lambda path: invert.plant(3, 2, seed=SEED)[0].save(path),
    "input.safetensors": lambda path: write_tensors(
        path, {"X": invert.plant(3, 2, seed=SEED)[1]}
    ),
    "classifier": _classifier,
    "headless": lambda path: tiny_models.save("bert", path),
    "decoder": _decoder,
    "good.leak": _good_leak,
    "read.jsonl": _read,
    "flips.jsonl": _journal,
    "epochs": _epochs,
}
