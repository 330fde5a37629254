"""Every mistake on the command line ends with one clear line."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

import tiny_models as tiny
from keyhole import invert

WRONG = {
    "extract no.safetensors": "there is no such file",
    "extract text.txt": "as a .safetensors file",
    "audit nan.safetensors": "W holds NaN or infinity",
    "extract demo --method magic": "there is no method 'magic': choose among auto",
    "frobnicate": "No such command .frobnicate.",
    "audti demo": "No such command .audti.. Did you mean .audit.?",
    "audit demo --outputs x": "^keyhole: No such option: --outputs .*See 'keyhole audit --help'.$",
    "audit demo --seed x": "^keyhole: Invalid value for '--seed'",
    "extract demo --method nuclear-norm": "nuclear-norm needs its rank: give -o rank=VALUE",
    "extract demo --method tolerant": "tolerant needs its answer_error",
    "lab plant x.safetensors -o dim=3 -o rank=9": "rank must be from 1 to dim = 3, not 9",
    "extract demo --budget -1": "budget must be 0 or more, not -1",
    "lab plant no/x.safetensors": "cannot write",
    "extract demo --ledger text.txt": "as a Keyhole ledger",
    "report text.txt": "is not a JSON file",
    "audit http://127.0.0.1:9/x": "must have the form http://host:port/v2/models",
    "invert text.txt": "as a .safetensors file",
    "invert small.safetensors": "must hold tensors W, V and B",
    "invert p.safetensors --method closed-form": "needs the attention maps",
    "invert p.safetensors -o starts=0": "starts must be 1 or more",
    "invert p.safetensors --out no/f.json": "cannot write",
    "audit ./nowhere/": "there is no",
    "audit ./missing-model": "there is no .*: give",
    "audit empty": "it has no config.json",
    "audit small.safetensors --data text.txt": "--data does not apply to the endpoint",
    "audit empty --ledger run.db": (
        "--ledger keeps the answers of an endpoint, and empty is a model: leave"
    ),
    "audit demo --data empty.txt": "there are no texts in empty.txt",
    "audit demo --layers one": "--layers takes numbers",
    "lab capture demo --text a --expose thoughts:1": "one of hidden",
    "lab capture demo --text a --expose hidden:9": "from 0 to 4",
    "lab capture demo --expose hidden:1": "give texts with --text or --data",
    "lab capture demo --text ' ' --expose hidden:1": "a text must have at least one token: ' '",
    "lab capture demo --text a --expose hidden:1 --precision int3": "precision .*float32",
    "recover demo text.txt": "text.txt is not a leak file",
    "recover demo empty": "empty holds no leaks",
    "recover demo p.safetensors": "written by Keyhole",
    "disrupt headless --data dev.tsv": "has no head for a task",
    "disrupt demo --processes -1": "^keyhole: --processes must be 0 ",
    "disrupt demo --data five.tsv": "be from 0 to 1 .*got 5",
    "harden demo --data text.txt --out o": "with a label",
    "harden demo --data dev.tsv --out headless": "choose a new folder",
    "audit small.safetensors --output html=no/p.html": "cannot write no/p.html",
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.items())
def test_wrong_input_is_one_clear_line(tmp_path, keyhole, arguments, words):
    (tmp_path / "text.txt").write_text(
        "hello, this is not what you are looking for" * 20
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na fine film\t1\nbad\t0\n")
    (tmp_path / "five.tsv").write_text("sentence\tlabel\na fine film\t5\n")
    if "headless" in arguments:
        tiny.save("bert", tmp_path / "headless")
    invert.plant(3, 2, symmetric=True)[0].save(tmp_path / "p.safetensors")
    eye = torch.eye(2, dtype=torch.float64)
    metadata = {"keyhole": "1", "kind": "head"}
    for name, W in {"nan": eye * torch.nan, "small": eye}.items():
        head = {"W": W, "v": eye[0].clone()}
        save_file(head, tmp_path / f"{name}.safetensors", metadata=metadata)
    done = keyhole(arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stderr)
    if done.stderr.startswith("keyhole:"):
        assert done.stderr.count("\n") == 1
