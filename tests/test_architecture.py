"""Which package may import which, how long modules may be, and that tests use public names only.

A package imports only from layers below its own, and not from packages of the same
layer. Imports inside functions, by name and for type checkers count, too.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
BENCHMARKS = TESTS.parent / "benchmarks"

LAYERS = (  # from the bottom up
    {"version"},
    {"core"},  # errors, files, results, registry, tasks, journal
    {"attention", "data", "defence"},
    {"target"},  # what TARGET means
    {"oracle"},  # endpoints that answer
    {"stores"},  # where embeddings are kept
    {"models"},  # models that can be looked into
    {"endpoints"},  # the targets that answer, opened
    {"extract", "invert", "recover", "disrupt"},  # the attacks
    {"harden"},  # training against them
    {"assess"},  # what an audit means: severities, policies, baselines
    {"report"},  # what came out, for people: pages, tables, files
    {"audit"},  # all attacks on one target
    {"cli", "testing", "callback"},  # what people call
    {"__main__", "__init__"},
)
# Old names that stay importable, looked up on demand: `invert.recover_text` is
# recover's.
ALIASES = {"keyhole.invert": "recover"}

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SOURCE.rglob("*.py"))
}


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(MODULES[module].read_text("utf-8"))))


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Yield the project's own modules that a module imports, anywhere in it, with the lines."""
    for node in nodes(module):
        names: list[str] = []
        if isinstance(node, ast.Call):
            names = [
                name
                for name in imported_by_name(node)
                if package(name) != package(module)
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{MODULES[module]}:{node.lineno} is a relative import"
            )
            parent = str(node.module)
            names = [f"{parent}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else parent for name in names]
        for name in sorted({name for name in names if name.split(".")[0] == "keyhole"}):
            yield name, node.lineno


def imported_by_name(call: ast.Call) -> list[str]:
    """Return the module that a call such as `import_module("keyhole.report.page")` imports.

    If part of the name is only known at run time, that is the package in the known
    part.
    """
    function = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return []
    name = call.args[0]
    if isinstance(name, ast.JoinedStr):
        name = name.values[0]
    if not isinstance(name, ast.Constant):
        return []
    start = str(name.value).rstrip(".")
    return [start] if start in MODULES and start != "keyhole" else []


def test_an_import_by_name_is_an_import():
    calls = {
        'import_module("keyhole.report.page")': ["keyhole.report.page"],
        'importlib.import_module("keyhole.core").Result': ["keyhole.core"],
        '__import__("keyhole.audit")': ["keyhole.audit"],
        'importlib.import_module(f"keyhole.cli.{name}")': ["keyhole.cli"],
        'importlib.import_module("gguf")': [],
        'importlib.import_module(f"{module}")': [],
    }
    for call, expected in calls.items():
        found = [
            node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)
        ]
        assert [
            name for node in found for name in imported_by_name(node)
        ] == expected, call


def package(module: str) -> str:
    """Return the package or module directly under `keyhole` that a module belongs to."""
    return [*module.split("."), "__init__"][1]


HEIGHTS = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def test_every_package_has_a_layer():
    assert {package(module) for module in MODULES} <= set(HEIGHTS)


def test_a_package_imports_only_from_layers_below():
    wrong = [
        f"{MODULES[module].relative_to(SOURCE)}:{line}: {package(module)} imports {name}"
        for module in MODULES
        for name, line in imports(module)
        if package(name) != package(module)
        and HEIGHTS[package(name)] >= HEIGHTS[package(module)]
        and ALIASES.get(module) != package(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_a_detour():
    graph = {
        module: {name for name, _ in imports(module)} - {module} for module in MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_library_prints_nothing():
    printed = [
        f"{MODULES[module].relative_to(SOURCE)}:{node.lineno}"
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not printed


def reached(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names in other modules and objects that a file uses, with the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.name.rpartition(".")[2], node.lineno
        elif isinstance(node, ast.Attribute):
            if not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            for given in node.args if function.endswith(("attr", "patch")) else ():
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    yield given.value.rpartition(".")[2], node.lineno


# A name that stands alone or is a field of self, and so is this code's own; what other
# libraries call private is their affair. Names like `_repr_html_`, which libraries look
# for, are public.
PRIVATE = re.compile(r"""(?:\bself\.|(?<![\w.'"]))(_[A-Za-z]\w*)\b(?<!_)""")


def test_tests_reach_no_private_names():
    sources = [*MODULES.values(), *BENCHMARKS.glob("*.py")]
    private = {
        name for path in sources for name in PRIVATE.findall(path.read_text("utf-8"))
    }
    wrong: list[str] = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text("utf-8")
        if private.isdisjoint(re.findall(r"\b_\w+", text)):
            continue  # to parse them all takes seconds
        for name, line in reached(ast.parse(text)):
            if name in private:
                wrong.append(f"{path.relative_to(TESTS)}:{line}: {name} is private")
    assert not wrong, "\n".join(wrong)
