"""More than a thousand ways to call Keyhole wrongly, and a few right ones: the same every time.

What an option takes is read from the Typer commands themselves, so that a new option joins by
itself: its values of wrong types, out of every range, and, where it names a file, everything that a
path can lead to. What only some commands read (leaks, audits, journals …) is in bad_files.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import bad_files
import tampered
from command_line import parts
from keyhole.cli import COMMANDS

WORLD = "../world"  # where bad_files are, seen from the folder that a case runs in
WRONG, WORLDS_FAULT = frozenset({2}), frozenset({3})
DONE = frozenset({0, 1, 3})  # as far as a run can tell; 3: something could not be checked
_LONG = "n" * 300


@dataclass(frozen=True)
class Case:
    """One invocation: its words, the exit codes it may end with, the files it may change."""

    name: str
    words: tuple[str, ...]
    codes: frozenset[int] = WRONG
    copies: tuple[str, ...] = ()

    @property
    def needs(self) -> set[str]:
        """The bad files that it wants."""
        named = (word.rpartition("=")[2] for word in self.words)
        return {name.removeprefix(f"{WORLD}/") for name in named if name.startswith(WORLD)}


# A right call of each command, to which one wrong thing is done.
_CLASSIFIER = f"{WORLD}/classifier"
BASES: dict[str, dict[str, str]] = {
    "audit": {"target": f"{WORLD}/target.safetensors"},
    "extract": {"target": f"{WORLD}/target.safetensors"},
    "invert problem": {"problem": f"{WORLD}/problem.safetensors", "starts": "4"},
    "invert layers": {"stack": f"{WORLD}/stack.safetensors", "starts": "4"},
    "invert bounds": {
        "problem": f"{WORLD}/problem.safetensors", "at": f"{WORLD}/input.safetensors",
    },
    "invert text": {"model": _CLASSIFIER, "leaks": f"{WORLD}/good.leak"},
    "capture": {
        "model": _CLASSIFIER, "expose": "hidden:1", "text": "w1 w2", "out": "o.safetensors",
    },
    "corpus": {
        "model": f"{WORLD}/decoder", "texts": "2", "longest": "8", "begin": "w1", "out": "o.txt",
    },
    "disrupt": {
        "model": _CLASSIFIER, "data": f"{WORLD}/dev.tsv", "method": "random", "longest": "60",
    },
    "harden": {
        "model": _CLASSIFIER, "data": f"{WORLD}/dev.tsv", "out": "o", "method": "plain",
        "epochs": "1", "longest": "60",
    },
    "canonical": {"file": f"{WORLD}/target.safetensors"},
    "same": {"first": f"{WORLD}/target.safetensors", "second": f"{WORLD}/target.safetensors"},
    "report": {"findings": f"{WORLD}/audit-good.json"},
    "policy check": {"findings": f"{WORLD}/audit-good.json"},
    "cost head": {"width": "8"},
    "cost layer": {"width": "8"},
    "cost text": {"tokens": "8"},
    "check-config": {"paths": "."},
    "plant": {"path": "p.safetensors", "dim": "4"},
    "serve": {"target": f"{WORLD}/target.safetensors"},
}  # fmt: skip
# A model's audit: what is about texts is tried on it.
_MODEL = {"target": _CLASSIFIER, "data": f"{WORLD}/dev.tsv", "layers": "1"}

_OUTPUTS = {"page", "json_file", "out", "path", "ledger", "resume", "checkpoint"}
_NOT_WHOLE = ("x", "", "1.5", "nan")
_FAR = (str(10**30), str(-(10**30)), "-1")
_FLOATS = ("x", "", "nan", "inf", "-1", "1e400")
_ODD_WORDS = ("", "no-such-thing", "a\0b", "ü\udcff", "x" * 5000)
_PLACES = ("missing", *bad_files.ANY, "empty/inside", _LONG, "a\0b", "\udcff\udcfe", "")

# Where something of `_ODD_WORDS` is as good as any other word.
_ANY_WORD = {
    ("lab", "capture", "text"), ("disrupt", "text"), ("harden", "text"), ("audit", "column"),
    ("lab", "capture", "column"), ("lab", "serve", "name"), ("extract", "target"),
}  # fmt: skip


def _words(title: str, values: dict[str, str]) -> tuple[str, ...]:
    """The words of a command line: arguments first, options as --name=value."""
    _, params = _COMMANDS[title]
    given: list[str] = title.split()
    options: list[str] = []
    for name, value in values.items():
        parameter = params[name]
        if parameter.param_type_name == "argument":
            given.append(value)
        else:
            flag = max(parameter.opts, key=len)
            options.append(flag if parameter.is_flag else f"{flag}={value}")
    return (*given, *options)


def _commands() -> dict[str, tuple[Any, dict[str, Any]]]:
    made = {title: part for name in COMMANDS for title, part in parts(name).items()}
    return {
        title: (part, {parameter.name: parameter for parameter in part.params})
        for title, part in made.items()
    }


_COMMANDS = _commands()


def _type(parameter: Any) -> Any:
    """The type of one value: of a list, that of its entries."""
    annotation = parameter.type_descriptor.annotation
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


def _base(title: str, name: str) -> dict[str, str]:
    about_texts = ("data", "texts", "flips", "column", "label", "layers", "device")
    return _MODEL if title == "audit" and name in about_texts else BASES[title]


def _is_file(parameter: Any) -> bool:
    return _type(parameter) is Path or parameter.metavar in ("TARGET", "MODEL", "FILE")


def from_types() -> Iterator[Case]:
    """Every option of every command, with what it cannot take."""
    for title, (_, params) in _COMMANDS.items():
        for name, parameter in params.items():
            for value, codes in _wrong_values(title, parameter):
                values = {**_base(title, name), name: value}
                words = _words(title, values)
                if getattr(parameter, "is_flag", False):
                    words = (
                        *_words(title, BASES[title]),
                        f"{max(parameter.opts, key=len)}={value}",
                    )
                yield Case(f"{title} {name} {_short(value)}", words, codes)


def _wrong_values(title: str, parameter: Any) -> Iterator[tuple[str, frozenset[int]]]:
    name = str(parameter.name)
    if getattr(parameter, "is_flag", False):
        yield from (("perhaps", WRONG), ("", WRONG))
    elif _is_file(parameter):
        for place in _PLACES:
            value = f"{WORLD}/{place}" if place in bad_files.ANY else place
            yield value, _codes(title, name, place)
    elif _type(parameter) is int:
        yield from ((value, WRONG) for value in (*_NOT_WHOLE, *_FAR))
    elif _type(parameter) is float:
        yield from ((value, WRONG) for value in _FLOATS)
    else:
        for value in _ODD_WORDS:
            if (title, name, value) == ("lab", "serve", "name", "no-such-thing"):
                continue  # a good name: the server would run for ever
            codes = WRONG | DONE if (title, name) in _ANY_WORD or value == "" else WRONG
            yield value, codes


def _codes(title: str, name: str, place: str) -> frozenset[int]:
    """What a path leads to, and what that means where a file is read or written."""
    if (title, name) == ("check-config", "paths"):  # reads all files, whatever is in them
        return WRONG | DONE if place in ("empty", "binary", "folder", "") else WRONG
    if name not in _OUTPUTS or (title, name) == ("audit", "out"):  # of fleets alone
        return WRONG
    remembers = name in ("ledger", "resume", "checkpoint") or (title, name) == (
        "invert text",
        "out",
    )
    if place == "full":
        # A folder; and a page without --dev, which is refused before it is looked at.
        wrong = title == "harden" and name in ("out", "page")
        return WRONG if remembers or wrong else WORLDS_FAULT
    if title in ("harden", "capture") and name in ("out", "checkpoint") and place == "empty/inside":
        return DONE  # folders are made
    ok = {"missing", "dangling-link", "\udcff\udcfe"}
    if name in ("page", "json_file", "path") or (name == "out" and title not in _JOURNALS):
        ok |= {"endless"}  # a device takes what is written to it
    if title in ("harden", "capture") and name in ("out", "checkpoint"):
        ok |= {"folder"} if title == "harden" else set()
    if name in ("page", "json_file", "out", "path"):
        ok |= {"empty", "binary", "link-loop"} if title != "harden" or name == "page" else set()
    if name in ("ledger", "resume") or (title, name) == ("invert text", "out"):
        ok |= {"empty"}
        ok -= {"binary", "link-loop"}
    return WRONG | DONE if place in ok or place == "" else WRONG


_JOURNALS = ("invert text", "harden")


def _short(value: str) -> str:
    shown = value.encode("unicode_escape", "surrogateescape").decode("ascii", "replace")
    shown = shown.removeprefix(f"{WORLD}/")
    return shown if len(shown) < 40 else f"{shown[:20]}…{len(shown)}"


def _with(
    title: str, codes: frozenset[int] = WRONG, copies: tuple[str, ...] = (), **values: str
) -> Case:
    base = {**BASES[title], **values}
    said = " ".join(f"{name}={_short(value)}" for name, value in values.items())
    return Case(f"{title} {said}", _words(title, base), codes, copies)


def from_files() -> Iterator[Case]:
    """Every bad file where a command would read it."""
    for name in bad_files.TARGETS:
        for title in ("audit", "extract", "serve"):
            yield _with(title, target=f"{WORLD}/{name}")
    for name in (*bad_files.PROBLEMS, *bad_files.TARGETS):
        yield _with("invert problem", problem=f"{WORLD}/{name}")
        yield _with("invert bounds", problem=f"{WORLD}/{name}")
        yield _with("invert layers", stack=f"{WORLD}/{name}")
        yield _with("invert bounds", at=f"{WORLD}/{name}")
    for name in bad_files.LEAKS:
        codes = WRONG | DONE if name.startswith("float8") else WRONG  # of two kinds, one has a sign
        yield _with("invert text", codes, leaks=f"{WORLD}/{name}")
    for name, audit in tampered.AUDITS.items():
        yield Case(
            f"report {name} {_short(audit.about)}", ("report", f"{WORLD}/{name}"), audit.codes
        )
    for name in bad_files.DATA:
        unlabelled = name.startswith(
            ("label", "twice.csv", "choices", "endings", "dream", "surrogate")
        )
        either = WRONG | DONE
        yield _with("lab", "capture", either if unlabelled or name == "open-quote.csv" else WRONG,
                    data=f"{WORLD}/{name}")  # fmt: skip
        good = either if name in ("huge-field.csv", "latin") else WRONG
        for title in ("disrupt", "harden"):
            yield _with(title, good, data=f"{WORLD}/{name}")
        yield Case(
            f"audit data={name}", _words("audit", {**_MODEL, "data": f"{WORLD}/{name}"}), good
        )
    for name in bad_files.MODELS:
        about_heads = name in ("odd-architectures", "odd-classes")  # a capture needs none
        codes = WRONG | DONE if about_heads else WRONG
        yield _with("lab", "capture", codes, model=f"{WORLD}/{name}")
        yield _with("disrupt", model=f"{WORLD}/{name}")
        yield Case(f"audit {name}", _words("audit", {**_MODEL, "target": f"{WORLD}/{name}"}))


def from_stopped_runs() -> Iterator[Case]:
    """Journals, ledgers and checkpoints that are damaged or another run's."""
    for name in bad_files.JOURNALS:
        if name.startswith("flips"):
            words = ("disrupt", "demo", "--method=random", "--examples=1", f"--resume={name}")
        else:
            words = (*_words("invert text", BASES["invert text"]), f"--out={name}")
        codes = WRONG | DONE if name == "read-far-ids.jsonl" else WRONG  # a number is a number
        yield Case(f"resume {name}", words, codes, (name,))
    for name in bad_files.CHECKPOINTS:
        yield _with("harden", copies=(name,), checkpoint=name)
    for name in bad_files.LEDGERS:
        for title in ("audit", "extract"):
            yield _with(title, copies=(name,), ledger=name)


# The kinds of target that a size matters to.
_USED = {
    "dim": ("head", "multi-head", "one-layer", "relu", "attention"),
    "width": ("one-layer", "relu"),
    "heads": ("multi-head", "one-layer", "attention"),
}


def from_sizes() -> Iterator[Case]:
    """What would take all memory there is: refused before it is taken."""
    huge = str(10**12)
    for name in ("dim", "width", "heads"):
        for kind in ("head", "multi-head", "one-layer", "relu", "attention"):
            if kind in _USED[name]:
                yield _with("lab", "plant", kind=kind, **{name: huge})
    for name in ("dim", "heads", "tokens"):
        yield _with("lab", "plant", kind="inversion", **{name: huge})
    yield _with("lab", "plant", kind="inversion", tokens="300000", maps="")
    yield _with("lab", "plant", dim="1000000", rank="1")
    yield _with("invert problem", starts=huge)
    for method in ("adam", "lbfgs", "levenberg-marquardt", "newton-cg"):
        yield _with("invert problem", starts=huge, method=method)
    yield _with("disrupt", processes=huge)
    yield _with("disrupt", continuation=huge, model="../world/decoder")
    yield _with("harden", seeds=huge)
    yield _with("harden", model=f"{WORLD}/headless", data=f"{WORLD}/label-billion.tsv")
    for title in ("disrupt", "harden"):
        yield _with(title, DONE, longest=huge)
        yield _with(title, DONE, longest=huge, data=f"{WORLD}/long.tsv")
        yield _with(title, WRONG, longest="0")
        yield _with(title, WRONG, longest="1")
    for name in ("texts", "flips"):
        yield Case(f"audit {name} {huge}", _words("audit", {**_MODEL, name: huge}), DONE)
        yield Case(f"audit {name} 0", _words("audit", {**_MODEL, name: "0"}))
    for name in ("nul.txt", "huge-line.txt"):
        yield _with("lab", "capture", DONE, data=f"{WORLD}/{name}", out="leaks")
        yield Case(f"audit {name}", _words("audit", {**_MODEL, "data": f"{WORLD}/{name}"}), DONE)


def from_meanings() -> Iterator[Case]:
    """What is well formed and means nothing."""
    exposures = (
        "hidden", "hidden:", "hidden:-1", "hidden:1:2", "hidden:x", f"hidden:{10**30}", "hidden:²",
        "hidden:1.0", ":1", "pooled:1", "kv:99", "maps:0", "HIDDEN:1",
    )  # fmt: skip
    for expose in exposures:
        yield _with("lab", "capture", expose=expose)
    for layers in ("", "-1", "99", "1,,2", "1;2", str(10**30), "nan", "1.0", "1,99"):
        yield Case(f"audit layers {layers}", _words("audit", {**_MODEL, "layers": layers}))
    for device in ("", "gpu", "cuda:99", "cuda:-1", "meta", "cpu:99", "CPU!", "tpu"):
        yield Case(f"audit device {device}", _words("audit", {**_MODEL, "device": device}))
        for title in ("invert problem", "invert text", "lab", "capture", "disrupt", "harden"):
            yield _with(title, device=device)
    for address in ("http://", "http://x", "http:///v2/models/m", "http://a b/v2/models/m",
                    "http://127.0.0.1:99999/v2/models/m", "http://127.0.0.1:x/v2/models/m",
                    "http://[::1/v2/models/m", "https://", "ftp://a/b", "http://127.0.0.1/v2/models/",
                    "file:///etc/passwd", "http://\udcff/v2/models/m"):  # fmt: skip
        for title in ("audit", "extract"):
            yield _with(title, target=address)
    for title in ("audit", "extract"):
        yield _with(title, WORLDS_FAULT, target="http://127.0.0.1:9/v2/models/m")
    for address in ("nowhere", "tcp://", "tcp://x:y", "tcp://127.0.0.1:99999", "ftp://a:1", ""):
        yield _with("disrupt", WRONG | WORLDS_FAULT | DONE if not address else WRONG | WORLDS_FAULT,
                    dask=address)  # fmt: skip
    for title in ("disrupt", "harden"):
        yield _with(title, label="no-such-column")
        yield _with(title, text="no-such-column")
        yield _with(title, classes="good")
        yield _with(title, classes="good,good")
        yield _with(title, classes="a,b,c,d")
        yield _with(title, classes=",")
    yield Case("audit label", _words("audit", {**_MODEL, "label": "no-such-column"}))
    yield Case("audit column", _words("audit", {**_MODEL, "column": "no-such-column"}))
    for share in ("1.5", "-0.1", "nan", "inf"):
        yield _with("disrupt", share=share)
    for target in ("2", "-2", str(2**63)):
        yield _with("disrupt", target=target)
    for method, rates in {"sattend": ("1", "-0.1", "nan", "2"), "freelb": ("-1", "nan", "inf"),
                          "smart": ("nan", "-1"), "asa": ("nan", "inf")}.items():  # fmt: skip
        for rate in rates:
            yield _with("harden", method=method, rate=rate)
    for method in ("attack-masks", "strongest", "smart", "r3f", "asa"):
        for weight in ("nan", "inf", "-1"):
            yield _with("harden", method=method, weight=weight)
    for rate in ("0", "nan", "inf", "-1", "1e300"):
        yield _with(
            "harden", WRONG | WORLDS_FAULT if rate == "1e300" else WRONG, learning_rate=rate
        )
    for batch in ("0", "-1"):
        yield _with("harden", batch=batch)
        yield _with("harden", epochs=batch)
        yield _with("harden", seeds=batch)
        yield _with("harden", flips=batch)
    for title in ("extract",):
        for method, more in {"tolerant": {"answer_error": "-1"}, "low-rank": {"rank": "-2"},
                             "nuclear-norm": {"rank": "0"}, "fitted": {"answer_error": "-1"},
                             "single-head": {"rank": "1"}}.items():  # fmt: skip
            yield _with(title, method=method, **more)
        published = {"bound": "1", "margin": "0.3"}
        for more in ({"bound": "0"}, {"margin": "nan"}, {"accuracy": "2"}, {"answer_error": "1"}):
            given = {"answer_error": "1e-3", **published, **more}
            yield _with(title, method="tolerant-as-published", **given)
        for more in ({"bound": "inf"}, {"margin": "2"}, {"accuracy": "0"}):
            yield _with(title, method="sign-only-as-published", **{**published, **more})
        for more in ({"accuracy": "1e-20"}, {"values": "guess"}):
            yield _with(title, method="sign-only", **more)
        yield _with(title, method="nuclear-norm", rank="99")
        yield _with(title, method="nuclear-norm", rank="1", oversampling="0")
        yield _with(title, method="multi-head", heads="0")
        yield _with(title, method="tolerant", answer_error="0.1", repeats="0")
        yield _with(title, method="tolerant", answer_error="0.1", max_norm="0")
        yield _with(title, method="tolerant", answer_error="0.1", max_norm="nan")
        yield _with(title, method="tolerant", answer_error="inf")
    for scale in ("nan", "inf", "1e308"):
        yield _with("lab", "plant", WRONG | DONE if scale == "1e308" else WRONG, scale=scale)
        yield _with("lab", "plant", WRONG, scale=scale, kind="inversion")
    for port in ("0", "-1", "65536", "99999999"):
        yield _with("lab", "serve", port=port)
    for host in ("256.256.256.256", "no such host", "", "http://x", "a\0b", "x" * 500):
        yield _with("lab", "serve", WRONG, host=host)
    for name in ("", "a/b", "a b", "..", "x" * 5000, "\udcff"):
        yield _with("lab", "serve", WRONG, name=name)
    yield Case("nothing", (), frozenset({0, 2}))
    yield Case("no command", ("frobnicate",))
    yield Case("option alone", ("--no-such-option",))
    yield Case("empty command", ("",))
    for title in BASES:
        yield Case(f"{title} alone", tuple(title.split()), frozenset({0, 2}))
        yield Case(f"{title} unknown option", (*_words(title, BASES[title]), "--no-such-option"))
        yield Case(f"{title} one more", (*_words(title, BASES[title]), "more", "--", "and-more"))


def right() -> Iterator[Case]:
    """Controls: what is right is done."""
    for title in BASES:
        if title not in ("serve",):
            yield Case(f"{title} as it should be", _words(title, BASES[title]), DONE)
        yield Case(f"{title} help", (*title.split(), "--help"), frozenset({0}))
    yield Case("version", ("--version",), frozenset({0}))


def everything() -> list[Case]:
    """All of them; names are not taken twice."""
    made: dict[str, Case] = {}
    for source in (from_types, from_files, from_stopped_runs, from_sizes, from_meanings, right):
        for case in source():
            made.setdefault(case.name, case)
    return list(made.values())


def sample(count: int = 70, seed: int = 2601) -> list[Case]:
    """A few of each command, the same every time."""
    cases = everything()
    return random.Random(seed).sample(cases, count)
