"""fleet.toml: options by their names, paths from its folder, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole.audit import AuditOptions, read_fleet
from keyhole.core.errors import MOST, InputError


@pytest.fixture
def fleet(tmp_path):
    """What a file with such a text says."""

    def read(text, **base):
        (tmp_path / "fleet.toml").write_text(text)
        return read_fleet(tmp_path / "fleet.toml", AuditOptions(**base))

    for name in ("b", "a", ".hidden"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "notes").mkdir()
    (tmp_path / "models" / "README.md").touch()
    return read


def test_a_target_comes_before_defaults_and_those_before_the_command_line(
    fleet, tmp_path
):
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
        seed=7,
        texts=1,
        flips=2,
    )
    assert (first.name, first.stem, second.name, second.stem) == (
        "first",
        "first",
        "models/b",
        "models-b",
    )
    assert (first.target.options.texts, second.target.options.texts) == (MOST, 5)
    assert (first.target.options.layers, second.target.options.layers) == ((1, 6), None)
    assert (
        first.target.options.data
        == second.target.options.data
        == str(tmp_path / "texts.tsv")
    )
    assert first.target.options.seed == second.target.options.seed == 7
    assert (first.target.options.flips, second.target.options.against_defences) == (
        2,
        True,
    )
    assert second.target.options.endpoint.headers == {"Authorization": "HOME"}
    assert second.target.options.endpoint.timeout == 3
    assert second.target.place == str(tmp_path / "models/b")
    assert second.target.name == "./models/b"


def test_a_pattern_is_every_target_that_it_matches(fleet):
    members = fleet('[[target]]\ntarget = "./models/*"\nname = "ours"')
    assert [(each.name, each.target.name) for each in members] == [
        ("ours/a", "models/a"),
        ("ours/b", "models/b"),
    ]


def test_names_of_files_are_plain_whatever_a_target_is_called(fleet):
    names = [
        "../../etc/passwd",
        "index",
        "<script>alert(1)</script>",
        "A",
        "a",
        "…",
        "x" * 300,
    ]
    text = "".join(
        f"[[target]]\nname = '{name}'\ntarget = 'models/a'\n" for name in names
    )
    members = fleet(text)
    assert [each.name for each in members] == names
    assert [each.stem for each in members] == [
        "etc-passwd",
        "index-2",
        "script-alert-1-script",
        "a",
        "a-2",
        "target",
        "x" * 80,
    ]


def test_what_is_no_file_stays_as_it_is(fleet, tmp_path):
    (tmp_path / "store").mkdir()
    members = fleet(
        """
        [[target]]
        target = "demo"
        [[target]]
        target = "chroma:store"
        model = "models/a"
        [[target]]
        target = "http://user:secret@localhost:1/v2/models/m"
        """
    )
    assert [each.target.place for each in members] == [
        "demo",
        f"chroma:{tmp_path}/store",
        "http://user:secret@localhost:1/v2/models/m",
    ]
    assert members[1].target.options.model == f"{tmp_path}/models/a"
    assert members[2].name == "http://localhost:1/v2/models/m"
    assert [each.target.local_only for each in members] == [False, False, True]


ONE = '[[target]]\ntarget = "demo"\n'
WRONG = {
    "[[target": "fleet.toml is not TOML: Expected",
    "": r"has no \[\[target\]\]: it needs one or more",
    '[target]\ntarget = "demo"': r"expected .*fleet\.toml, \[\[target\]\] as a valid array, got {",
    '[[target]]\nname = "x"': r"\[\[target\]\] 1 has no target",
    "target = [1]": r"expected .*\[\[target\]\]\[0\] as an object, got 1",
    f"{ONE}text = 3": r"^text has no meaning in .*\[\[target\]\] 1: did you mean texts\?",
    f"{ONE}against-defence = true": r"did you mean against_defences\?",
    f"[default]\n{ONE}": r"^default has no meaning in .*: did you mean defaults\?",
    f"{ONE}zzzz = 3": r"^zzzz has no meaning in .*\[\[target\]\] 1: it takes ",
    f"{ONE}texts = true": "expected texts in .* as a valid integer, got True",
    f"{ONE}data = 3": "expected data in .* as a valid string, got 3",
    f"{ONE}flips = 0": "--flips must be 1 or more, not 0",
    f"{ONE}seed = -1": "a seed must be from 0",
    f'{ONE}layers = "1;2"': "--layers takes numbers .1,6,12. or all, not '1;2'",
    "defaults = 3\n" + ONE: r"expected .*\[defaults\] as an object, got 3",
    f'[defaults]\nname = "x"\n{ONE}': r"^name has no meaning in .*\[defaults\]",
    f'[defaults]\nledger = "x"\n{ONE}': r"^ledger has no meaning in .*\[defaults\]",
    ONE + ONE: "two targets called demo",
    '[[target]]\ntarget = "./nowhere/*"': "no target matches ./nowhere/",
    '[[target]]\ntarget = "a**b/*"': "is not a pattern of names",
    f'{ONE}header = "Authorization: hunter2"': "--header takes NAME=VARIABLE",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items())
def test_what_is_wrong_is_said_in_one_line(text, words, fleet):
    with pytest.raises(InputError, match=words) as refused:
        fleet(text)
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(InputError, match="as a fleet file"):
            read_fleet(path)
