"""`make check` leaves slow tests out; what it keeps covers every package and every module."""

from __future__ import annotations

from pathlib import Path

import pytest

from timings import TESTS, name_of, slow_names

HERE = Path(__file__).parent
HOUSE = HERE.parent / "src" / "keyhole"
PACKAGES = sorted(path.parent.name for path in HOUSE.glob("*/__init__.py"))
MODULES = sorted(path.stem for path in HOUSE.glob("*.py"))
UNTESTED = {"__init__", "__main__", "errors"}  # nothing is in them that could be wrong


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> dict[str, pytest.Item]:
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("only some of the tests were collected")
    return pytestconfig.stash[TESTS]


def quick(collected: dict[str, pytest.Item], place: Path) -> list[str]:
    """The tests in a folder or a file that `make check` runs."""
    return [
        node
        for node, item in collected.items()
        if item.path.is_relative_to(place) and item.get_closest_marker("slow") is None
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_covered(collected, package):
    assert quick(collected, HERE / package)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in UNTESTED])
def test_every_module_is_covered(collected, module):
    assert quick(collected, HERE / f"test_{module}.py")


def test_what_is_called_slow_exists(collected):
    gone = slow_names() - {name_of(node) for node in collected}
    assert not gone, "tests/slow.txt is out of date: run `make timings`"
