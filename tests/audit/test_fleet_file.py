"""fleet.toml: options by their names, paths from its folder, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole.audit import Opening, read_fleet
from keyhole.core.errors import MOST, InputError


@pytest.fixture
def fleet(tmp_path):
    """What a file with such a text says."""

    def read(text, **base):
        (tmp_path / "fleet.toml").write_text(text)
        return read_fleet(tmp_path / "fleet.toml", Opening("", **base))

    for name in ("b", "a", ".hidden"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "notes").mkdir()
    (tmp_path / "models" / "README.md").touch()
    return read


def test_a_target_comes_before_defaults_and_those_before_the_command_line(fleet, tmp_path):
    first, second = fleet(
        """
        [defaults]
        texts = 5
        data = "texts.tsv"
        [[target]]
        name = "first"
        target = "models/a"
        texts = "all"
        layers = [1, 6]
        [[target]]
        target = "./models/b"
        against-defences = true
        header = "Authorization=HOME"
        timeout = 3
        """,
        seed=7, texts=1, flips=2,
    )  # fmt: skip
    assert (first.name, first.stem, second.name, second.stem) == (
        "first", "first", "models/b", "models-b",
    )  # fmt: skip
    assert (first.opening.texts, second.opening.texts) == (MOST, 5)
    assert (first.opening.layers, second.opening.layers) == ((1, 6), None)
    assert first.opening.data == second.opening.data == str(tmp_path / "texts.tsv")
    assert first.opening.seed == second.opening.seed == 7
    assert (first.opening.flips, second.opening.against_defences) == (2, True)
    assert second.opening.endpoint.headers == {"Authorization": "HOME"}
    assert second.opening.endpoint.timeout == 3
    assert second.opening.place == str(tmp_path / "models/b")
    assert second.opening.shown(f"the model {tmp_path}/models/b") == "the model ./models/b"


def test_a_pattern_is_every_target_that_it_matches(fleet):
    members = fleet('[[target]]\ntarget = "./models/*"\nname = "ours"')
    assert [(each.name, each.opening.target) for each in members] == [
        ("ours/a", "models/a"), ("ours/b", "models/b"),
    ]  # fmt: skip


def test_names_of_files_are_plain_whatever_a_target_is_called(fleet):
    names = ["../../etc/passwd", "index", "<script>alert(1)</script>", "A", "a", "…", "x" * 300]
    text = "".join(f"[[target]]\nname = '{name}'\ntarget = 'models/a'\n" for name in names)
    members = fleet(text)
    assert [each.name for each in members] == names
    assert [each.stem for each in members] == [
        "etc-passwd", "index-2", "script-alert-1-script", "a", "a-2", "target", "x" * 80,
    ]  # fmt: skip


def test_what_is_no_file_stays_as_it_is(fleet, tmp_path):
    (tmp_path / "store").mkdir()
    members = fleet(
        """
        [[target]]
        target = "demo"
        [[target]]
        target = "chroma:store"
        model = ["models/a", "owner/name"]
        [[target]]
        target = "http://user:secret@localhost:1/v2/models/m"
        """
    )
    assert [each.opening.place for each in members] == [
        "demo", f"chroma:{tmp_path}/store", "http://user:secret@localhost:1/v2/models/m",
    ]  # fmt: skip
    assert members[1].opening.model == (f"{tmp_path}/models/a", "owner/name")
    assert members[2].name == "http://localhost:1/v2/models/m"
    assert [each.opening.stays for each in members] == [False, False, True]


ONE = '[[target]]\ntarget = "demo"\n'
WRONG = {
    "no TOML": ("[[target", "expected TOML in .*fleet.toml, got Expected"),
    "nothing": ("", r"expected one \[\[target\]\] or more in .*, got none"),
    "a table": ('[target]\ntarget = "demo"', r"expected one \[\[target\]\] or more"),
    "no target": ('[[target]]\nname = "x"', r"expected target in .*, \[\[target\]\] 1, got none"),
    "no table": ("target = [1]", r"expected a table in .*\[\[target\]\] 1, got 1"),
    "a key": (f"{ONE}text = 3", r"\[\[target\]\] 1, got text: did you mean texts\?"),
    "a hyphen": (f"{ONE}against-defence = true", r"did you mean against_defences\?"),
    "a section": (f"[default]\n{ONE}", r"got default: did you mean defaults\?"),
    "far from any": (f"{ONE}zzzz = 3", r"\[\[target\]\] 1, got zzzz$"),
    "a type": (f"{ONE}texts = true", "expected texts as a whole number in .*, got True"),
    "a number": (f"{ONE}data = 3", "expected data as text in .*, got 3"),
    "a range": (f"{ONE}flips = 0", "expected --flips of 1 or more, got 0"),
    "a seed": (f"{ONE}seed = -1", "expected a seed from 0"),
    "layers": (f'{ONE}layers = "1,2"', "expected layers as a whole number in .*, got '1,2'"),
    "defaults": ("defaults = 3\n" + ONE, r"expected \[defaults\] as a table"),
    "a shared name": (f'[defaults]\nname = "x"\n{ONE}', r"\[defaults\], got name"),
    "a shared ledger": (f'[defaults]\nledger = "x"\n{ONE}', r"\[defaults\], got ledger"),
    "twice": (ONE + ONE, "expected each name once in .*, got demo twice"),
    "no match": ('[[target]]\ntarget = "./nowhere/*"', "expected targets that match ./nowhere/"),
    "a bad pattern": ('[[target]]\ntarget = "a**b/*"', "expected a pattern of names"),
    "a NUL": ('[[target]]\ntarget = "a\\u0000b"', "expected target as text"),
    "a secret": (f'{ONE}header = "Authorization: hunter2"', "--header takes NAME=VARIABLE"),
}


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_line(text, words, fleet):
    with pytest.raises(InputError, match=words) as refused:
        fleet(text)
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(InputError, match="expected a fleet file, got"):
            read_fleet(path)
