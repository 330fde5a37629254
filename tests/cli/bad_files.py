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
from safetensors.torch import save_file

import tampered
import tiny_classifiers
import tiny_models
from keyhole import invert, oracle

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


def _oracle(kind: str, **tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path, {"keyhole": "1", "kind": kind})


def _head(
    about: dict[str, str] | None = None, **changes: torch.Tensor
) -> Callable[[Path], None]:
    tensors = {"W": _EYE, "v": _EYE[0].clone(), **changes}
    return lambda path: save_file(tensors, path, {**_HEAD, **(about or {})})


def _cut_target(end: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(make(path.parent, "target.safetensors").read_bytes()[:end])

    return write


TARGETS: dict[str, Callable[[Path], None]] = {
    "nan-weights.safetensors": _head(W=_EYE * torch.nan),
    "inf-weights.safetensors": _head(W=_EYE * torch.inf),
    "half-weights.safetensors": _head(W=_EYE.half(), v=_EYE[0].half()),
    "int-weights.safetensors": _head(W=_EYE.long(), v=_EYE[0].long()),
    "odd-shapes.safetensors": _head(W=_EYE[:2].clone()),
    "no-axis.safetensors": _head(v=_EYE.sum()),
    "no-entries.safetensors": _head(W=torch.ones(0, 0), v=torch.ones(0)),
    "no-v.safetensors": _oracle("head", W=_EYE),
    "no-tensors.safetensors": _oracle("head"),
    "other-kind.safetensors": _oracle("banana", W=_EYE),
    "other-version.safetensors": _head({"keyhole": "9"}),
    "other-link.safetensors": _head({"link": "cubic"}, offset=torch.zeros(())),
    "nan-offset.safetensors": _head(
        {"link": "sigmoid"}, offset=torch.tensor(torch.nan, dtype=torch.float64)
    ),
    "wide-offset.safetensors": _head(
        {"link": "softmax"}, offset=torch.zeros(7, 2, dtype=torch.float64)
    ),
    "flat-layer.safetensors": _oracle(
        "one-layer", W=_EYE, A=_EYE[0].clone(), w=_EYE[0].clone()
    ),
    "flat-relu.safetensors": _oracle("relu", A=_EYE[0].clone(), w=_EYE[0].clone()),
    "scalar-heads.safetensors": _oracle("multi-head", W=_EYE.sum(), v=_EYE.sum()),
    "flat-heads.safetensors": _oracle(
        "multi-head", W=_EYE[0].clone(), v=_EYE[0].clone()
    ),
    "promises.safetensors": _bytes(_claims([2**40, 2**40])),
    "overflows.safetensors": _bytes(_claims([2**62, 2**62, 2**62])),
    "negative-shape.safetensors": _bytes(_claims([-1, 3])),
    "odd-dtype.safetensors": _bytes(_claims([1], "F65")),
    "endless-header.safetensors": _bytes(struct.pack("<Q", 2**60) + b"{}"),
    "deep-header.safetensors": _bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "sparse.safetensors": _sparse,
    "cut-off.safetensors": _cut_target(-40),
    "cut-header.safetensors": _cut_target(30),
}


def _problem(
    about: dict[str, str] | None = None, **changes: torch.Tensor
) -> Callable[[Path], None]:
    problem, _ = invert.plant(3, 2, seed=SEED)
    tensors = {"W": problem.W, "V": problem.V, "B": problem.B, **changes}
    metadata = about or {"keyhole": "1", "kind": "inversion"}
    return lambda path: save_file(tensors, path, metadata)


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
    "nan-tolerance.safetensors": _problem({"tolerance": "nan"}),
    "word-gamma.safetensors": _problem({"gamma": "much"}),
    "negative-gamma.safetensors": _problem({"gamma": "-1"}),
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


def _pooled(about: str) -> Callable[[Path], None]:
    return _leak("pooled", values=torch.ones(32), raw=about)


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
    "pooled-way.leak": _pooled('{"pooling": "median"}'),
    "pooled-tokens.leak": _pooled('{"tokens": -5}'),
    "pooled-many.leak": _pooled('{"tokens": 1000000000000}'),
    "pooled-half.leak": _pooled('{"tokens": 2.5}'),
    "pooled-flag.leak": _pooled('{"normalised": "perhaps"}'),
}

# Texts and examples.

_HEADER = "sentence\tlabel"
LABELS = {
    "word": "good",
    "float": "1.5",
    "1e30": "1e30",
    "nan": "nan",
    "minus": "-1",
    "large": "7",
    "billion": "1000000000",
    "huge": str(10**30),
    "digits": "9" * 5000,
    "empty": "",
    "superscript": "²",
}


def _labelled(label: str) -> Callable[[Path], None]:
    return _lines(f'{{"sentence": "a fine film", "label": {label}}}')


def _choices(endings: str, label: str) -> Callable[[Path], None]:
    return _lines(f'{{"ctx": "c", "endings": {endings}, "label": {label}}}')


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
    **{
        f"label-{name}.tsv": _lines(_HEADER, f"{SENTENCE}\t{label}")
        for name, label in LABELS.items()
    },
    "label-1e30.jsonl": _labelled("1e30"),
    "label-nan.jsonl": _labelled("NaN"),
    "label-infinite.jsonl": _labelled("Infinity"),
    "label-list.jsonl": _labelled("[1]"),
    "label-null.jsonl": _labelled("null"),
    "text-number.jsonl": _lines('{"sentence": 5, "label": 1}'),
    "numbers.jsonl": _lines("5", "6"),
    "cut-off.jsonl": _lines('{"sentence": "a fine'),
    "deep.jsonl": _lines("[" * 100_000),
    "deep.json": _lines("[" * 100_000),
    "deep-inside.jsonl": _labelled("[" * 100_000),
    "digits.jsonl": _labelled("9" * 5000),
    "surrogate.jsonl": _lines('{"sentence": "\\ud800 \\udfff \\ud800", "label": [0]}'),
    "object.json": _lines('{"data": []}'),
    "numbers.json": _lines("[1, 2, 3]"),
    "nulls.json": _lines("[null]"),
    "dream-short.json": _lines('[[["M: hello"], [{"question": "who?"}]]]'),
    "dream-numbers.json": _lines(
        '[[[1, 2], [{"question": "q", "choice": ["a", "b"], "answer": "a"}], 3]]'
    ),
    "choices-one.jsonl": _choices('["a"]', "0"),
    "choices-far.jsonl": _choices('["a", "b"]', "5"),
    "choices-float.jsonl": _choices('["a", "b"]', "0.5"),
    "endings-null.jsonl": _choices("null", "0"),
    "endless.tsv": _link("/dev/zero"),
    "pipe.tsv": os.mkfifo,
    "pipe.txt": os.mkfifo,
}
# Models: the tiny classifier's folder, but for what is wrong with it.


def _classifier(path: Path) -> None:
    model = tiny_classifiers.model(labels=2, max_position_embeddings=80).eval()
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)


def _damaged(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.copytree(make(path.parent, "classifier"), path)
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
    "endless-config": _special("config.json", _link("/dev/zero")),
    "looped-config": _special("config.json", _link("config.json")),
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


def _run(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def _ledger(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        target = oracle.load(make(path.parent, "target.safetensors"))
        with oracle.Ledger(target, path) as ledger:
            ledger(torch.ones(2, 2, target.dim, dtype=torch.float64))
        change(path)

    return write


LEDGERS: dict[str, Callable[[Path], None]] = {
    "other.db": lambda path: _run(path, "CREATE TABLE t (x)"),
    "cut-off.db": _ledger(lambda path: os.truncate(path, 5000)),
    "other-target.db": _ledger(
        lambda path: _run(path, "UPDATE meta SET value = 'x' WHERE name = 'target'")
    ),
    "no-meta.db": _ledger(lambda path: _run(path, "DROP TABLE meta")),
    "no-answers.db": _ledger(lambda path: _run(path, "DROP TABLE answers")),
}


MAKERS: dict[str, Callable[[Path], None]] = {
    **ANY,
    **TARGETS,
    **PROBLEMS,
    **LEAKS,
    **DATA,
    **MODELS,
    **LEDGERS,
    **{name: _bytes(text) for name, text in tampered.AUDITS.items()},
    "target.safetensors": lambda path: oracle.save(
        oracle.plant(dim=3, seed=SEED), path
    ),
    "classifier": _classifier,
}
