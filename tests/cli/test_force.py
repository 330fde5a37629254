"""No file is replaced without --force; the error comes before any work."""

from __future__ import annotations

import re

import pytest

# Commands whose input does not exist: what is said about the output is said before it
# is looked at.
AUDIT = "audit no.safetensors"
WEIGHTS = "extract no.safetensors --out f.json"
LAYER = "invert no.safetensors --out f.json"
LEAK = "lab capture nowhere --text a --expose hidden:1"
EXISTING = [
    ("p.html", f"{AUDIT} --output html=p.html"),
    ("f.json", f"{AUDIT} --output json=f.json"),
    ("f.json", WEIGHTS),
    ("f.safetensors", WEIGHTS),
    ("f.json", LAYER),
    ("f.safetensors", LAYER),
    ("leak.safetensors", LEAK),
    ("leaks/leak-0001.safetensors", f"{LEAK} --text b --out leaks"),
    ("t.safetensors", "lab plant t.safetensors -o dim=2 -o rank=9"),
    ("f.json", "disrupt nowhere --data no.tsv --out f.json"),
]


@pytest.mark.parametrize(("file", "command"), EXISTING)
def test_what_exists_is_refused_before_the_work_starts(
    file, command, tmp_path, keyhole
):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    done = keyhole(command)
    assert done.returncode == 2
    assert done.stderr == f"keyhole: {file} exists: give --force to replace it\n"
    forced = keyhole(command, "--force")
    assert "--force" not in forced.stderr
    assert forced.returncode == 2  # for want of an input
    assert (tmp_path / file).read_text() == "mine"
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    folder = keyhole(command, "--force")
    assert folder.returncode == 2
    assert folder.stderr == f"keyhole: cannot write {file}: it is a folder\n"


def test_force_replaces(tmp_path, keyhole):
    made = "lab plant t.safetensors -o dim=3"
    assert keyhole(made).returncode == 0
    first = (tmp_path / "t.safetensors").read_bytes()
    assert keyhole(made, "--seed 1").returncode == 2
    assert (tmp_path / "t.safetensors").read_bytes() == first
    assert keyhole(made, "--seed 1 --force").returncode == 0
    assert (tmp_path / "t.safetensors").read_bytes() != first


def test_what_keyhole_named_itself_is_written_again(keyhole):
    keyhole("lab plant t.safetensors -o dim=3")
    for command in ("audit t.safetensors", "report keyhole-t.safetensors.json"):
        first = keyhole(command)
        second = keyhole(command)
        assert first.returncode == second.returncode in (0, 1), second.stderr
    for code in (1, 2):
        done = keyhole("audit t.safetensors --output=json=mine.json")
        assert done.returncode == code


def test_a_target_is_not_overwritten_by_what_was_taken_from_it(keyhole):
    """--out t.json would write the weights to t.safetensors, which is the target."""
    keyhole("lab plant t.safetensors -o dim=3")
    done = keyhole("extract t.safetensors --out t.json --force")
    assert done.returncode == 2
    assert done.stderr == (
        "keyhole: t.safetensors is read by this command: write to another file\n"
    )


@pytest.mark.parametrize("name", ["findings.json", "../{}/findings.json", "link.json"])
def test_no_input_is_replaced_by_whatever_name(name, tmp_path, keyhole):
    keyhole("lab plant t.safetensors -o dim=3")
    keyhole("audit t.safetensors --output=json=findings.json")
    (tmp_path / "link.json").symlink_to("findings.json")
    place = name.format(tmp_path.name)
    before = (tmp_path / "findings.json").read_bytes()
    for command in (
        f"report findings.json --output=html={place}",
        f"audit t.safetensors --data={place} --output=html=findings.json",
        f"report t.json --baseline={place} --output=html=findings.json",
    ):
        done = keyhole(command, "--force")
        assert done.returncode == 2
        assert re.search("is read by this command|is the baseline", done.stderr)
    assert (tmp_path / "findings.json").read_bytes() == before


@pytest.mark.parametrize("name", ["x.html", "../{}/x.html", "folder/x.html"])
def test_two_outputs_are_one_file_by_whatever_names(name, tmp_path, keyhole):
    (tmp_path / "folder").symlink_to(".")
    outputs = f"--output=html=x.html --output=json={name.format(tmp_path.name)}"
    done = keyhole("report no.json", outputs)
    assert done.returncode == 2
    assert "two outputs go to" in done.stderr
