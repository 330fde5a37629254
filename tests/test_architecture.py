"""The floors of the house: what may import what, and how large a module may grow.

A room imports only from floors below its own; rooms of one floor do not know each other. Imports
inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LONGEST = 320  # lines of a module

FLOORS = (  # from the ground up
    {
        "errors",
        "progress",
        "percent",
        "attention",
        "least_squares",
        "two_loop_recursion",
        "strict_json",
    },
    {"bounds", "devices", "memory", "share", "workers"},  # what a caller may ask for
    {"files"},
    {"registry", "resume", "data", "crew"},
    {"results"},  # what every attack returns
    {"oracle"},  # endpoints that answer
    {"stores"},  # where embeddings are kept
    {"models"},  # models that can be looked into
    {"extract", "invert", "recover", "disrupt"},  # the attacks
    {"harden"},  # training against them
    {"assess"},  # what an audit means: severities, rules, a verdict
    {"audit", "report"},  # all of them on one target; what came out, for people
    {"cli"},
    {"__main__", "__init__"},
)
# Old names that stay importable, looked up on demand: `invert.recover_text` is recover's.
ALIASES = {"keyhole.invert": "recover"}

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
NODES = {name: list(ast.walk(ast.parse(path.read_text("utf-8")))) for name, path in MODULES.items()}


def imports(module: str) -> Iterator[tuple[str, int]]:
    """The project's own modules that a module imports, anywhere in it, with the lines."""
    for node in NODES[module]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}:{node.lineno} is a relative import"
            parent = str(node.module)
            names = [f"{parent}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else parent for name in names]
        for name in sorted({name for name in names if name.split(".")[0] == "keyhole"}):
            yield name, node.lineno


def room(module: str) -> str:
    """The package or module right under `keyhole` that a module belongs to."""
    return [*module.split("."), "__init__"][1]


HEIGHTS = {name: height for height, floor in enumerate(FLOORS) for name in floor}


def test_every_room_has_a_floor():
    assert {room(module) for module in MODULES} == set(HEIGHTS)


def test_a_room_imports_from_floors_below_it():
    wrong = [
        f"{MODULES[module].relative_to(SOURCE)}:{line}: {room(module)} imports {name}"
        for module in MODULES
        for name, line in imports(module)
        if room(name) != room(module)
        and HEIGHTS[room(name)] >= HEIGHTS[room(module)]
        and ALIASES.get(module) != room(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_a_detour():
    graph = {module: {name for name, _ in imports(module)} - {module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_modules_stay_small():
    lengths = {
        str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines())
        for path in MODULES.values()
    }
    assert not {name: length for name, length in lengths.items() if length > LONGEST}


def test_the_library_prints_nothing():
    printed = [
        f"{MODULES[module].relative_to(SOURCE)}:{node.lineno}"
        for module, nodes in NODES.items()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not printed
