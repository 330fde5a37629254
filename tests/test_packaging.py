"""What is installed, built and declared: locks, dependencies and what the wheel holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import keyhole
from sample_audits import whole

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEMO = ("models", "proofs")  # the extras that the audit of the demo makes use of
BUILD = ("editables", "hatchling")  # what `pip install --no-build-isolation -e .` needs


def locked(name: str) -> dict[str, str]:
    """The lines of a lock, by the name of their package."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def needed(requirements: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """The packages that hold here, with the extras that are asked of them."""
    for text in requirements:
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield canonicalize_name(need.name), frozenset(need.extras)


def closure(requirements: Iterable[str]) -> set[str]:
    """All packages that installing `requirements` brings, as the installed ones state it."""
    todo = list(needed(requirements))
    done = set[tuple[str, frozenset[str]]]()
    while todo:
        package = todo.pop()
        if package in done:
            continue
        done.add(package)
        name, extras = package
        stated = [Requirement(text) for text in metadata.requires(name) or ()]
        todo += [
            (canonicalize_name(need.name), frozenset(need.extras))
            for need in stated
            if need.marker is None
            or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        ]
    return {name for name, _ in done}


def test_the_demo_is_installed_from_the_same_lock():
    assert (
        locked("requirements-demo.lock").items() <= locked("requirements.lock").items()
    )


def test_the_demos_lock_holds_all_that_it_needs_and_no_more():
    own = [
        *PROJECT["dependencies"],
        *(need for extra in DEMO for need in EXTRAS[extra]),
        *BUILD,
    ]
    # A torch for a graphics card brings libraries that the lock of all machines does
    # not name.
    assert closure(own) & set(locked("requirements.lock")) == set(
        locked("requirements-demo.lock")
    )


def imported_packages() -> set[str]:
    """The packages of others that the source imports, anywhere in it."""
    modules: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module).partition(".")[0])
    return modules - sys.stdlib_module_names - {"keyhole"}


@pytest.mark.release
def test_what_the_source_imports_is_declared():
    extras = [
        need
        for name, needs in EXTRAS.items()
        if name not in ("all", "dev", "docs")
        for need in needs
    ]
    declared = {
        canonicalize_name(Requirement(need).name)
        for need in (*PROJECT["dependencies"], *extras)
    }
    owners = metadata.packages_distributions()
    undeclared = {
        module
        for module in imported_packages()
        if not declared
        & {canonicalize_name(owner) for owner in owners.get(module, [module])}
    }
    assert undeclared == {"pytest"}  # which alone loads the plugin (testing/plugin.py)


def test_every_extra_is_part_of_all():
    (whole,) = EXTRAS["all"]
    assert Requirement(whole).extras == set(EXTRAS) - {"all", "dev", "docs"}


SMALL = {  # what works without the extra `models`, and what it says or writes
    "policy audit.json": "6 of 8 findings fail",
    "report audit.json --force --output=html=audit.html": "hidden states of layer 3",
    "report audit.json --output=sarif=-": "KH-TEXT-HIDDEN-STATES",
}
LARGE = ("audit demo", "recover model leak", "lab methods")  # name the extra


def works_without_torch(keyhole: list[str], folder: Path) -> None:
    """The small commands answer, and the others say which extra they need."""

    def run(words: str) -> subprocess.CompletedProcess[str]:
        command = [*keyhole, *words.split()]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    whole().save(folder / "audit.json")
    for words, said in SMALL.items():
        done = run(words)
        assert said in done.stdout, (words, done.stderr)
        assert done.returncode in (0, 1), done.stderr
    assert "hidden states of layer 3" in (folder / "audit.html").read_text("utf-8")
    for words in LARGE:
        done = run(words)
        (line,) = done.stderr.splitlines()
        assert line.endswith(": pip install 'keyhole[models]'"), words
        assert done.returncode == 2


@pytest.mark.release
def test_commands_that_need_no_torch_work_without_it(tmp_path):
    absent = {Requirement(need).name.replace("-", "_") for need in EXTRAS["models"]}
    # imports of it fail
    hidden = f"import sys; sys.modules |= dict.fromkeys({sorted(absent)!r})"
    run = "from keyhole.cli import main; sys.argv[0] = 'keyhole'; main()"
    works_without_torch([sys.executable, "-c", f"{hidden}; {run}"], tmp_path)


@pytest.mark.release
def test_the_wheel_alone_is_small_and_works(wheel, tmp_path, capsys):
    started = time.monotonic()
    venv.create(tmp_path / "bare", with_pip=True)
    pip = f"{tmp_path}/bare/bin/python -m pip install -q -c requirements.lock"
    made = time.monotonic()
    command = [*pip.split(), str(wheel.filename)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250)
    seconds = time.monotonic() - made
    (packages,) = (tmp_path / "bare/lib").glob("python*/site-packages")
    brought = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    files = [path for path in packages.rglob("*") if path.is_file()]
    own = [
        path
        for path in files
        if not re.match("pip|setuptools", str(path.relative_to(packages)))
    ]
    size = sum(path.stat().st_size for path in own) / 2**20
    assert not {"torch", "numpy", "transformers", "httpx"} & brought
    assert size < 80
    works_without_torch([str(tmp_path / "bare/bin/keyhole")], tmp_path)
    with capsys.disabled():
        print(
            f"\npip install keyhole: {size:.0f} MiB in {len(brought)} packages, {seconds:.0f} s, "
            f"and {made - started:.0f} s for the environment"
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("dist")
    (path,) = WheelBuilder(str(ROOT)).build(
        directory=str(folder), versions=["standard"]
    )
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.mark.release
def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    source = ROOT / "src"
    there = {
        str(path.relative_to(source))
        for path in (source / "keyhole").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == there
    assert {"keyhole/py.typed", "keyhole/recover/embeddings/corpus.txt"} <= held


@pytest.mark.release
def test_the_wheel_says_what_it_is(wheel):
    (name,) = (
        name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")
    )
    about = metadata.PathDistribution(
        zipfile.Path(wheel, f"{Path(name).parent}/")
    ).metadata
    assert about["Version"] == keyhole.__version__
    assert set(about.get_all("Provides-Extra") or ()) == set(EXTRAS)
    versions = [
        f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)
    ]
    assert set(versions) <= set(about.get_all("Classifier") or ())
