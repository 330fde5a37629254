"""The Python reference, made from docstrings: a page for the `__all__` of each public package.

Sources are parsed, not imported, so that the site can be built without torch and the
extras. A name is followed through `from … import …` lines to its definition.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PACKAGES = (
    "audit",
    "assess",
    "extract",
    "invert",
    "recover",
    "disrupt",
    "harden",
    "oracle",
    "models",
    "stores",
    "report",
    "core",
    "testing",
    "data",
    "attention",
)
TAG = re.compile(r"(`[^`]*`)|<(?=[a-zA-Z/!])")  # code matches first, so that it stays
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """A public name: the module that defines it, and its node there (None for a constant)."""

    name: str
    module: str
    node: Definition | None

    @property
    def source(self) -> str:
        return str(path_of(self.module).relative_to(SOURCE.parent))


def path_of(module: str) -> Path:
    place = SOURCE / Path(*module.split("."))
    package = place / "__init__.py"
    return package if package.exists() else place.with_suffix(".py")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text("utf-8"))


def exported(module: str) -> list[str]:
    """Return `__all__`, or the public definitions of a module without it."""
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    names = [node.name for node in tree(module).body if isinstance(node, Definition)]
    return sorted(name for name in names if not name.startswith("_"))


def public_names(package: str) -> list[Name]:
    return [
        _follow(f"keyhole.{package}", name) for name in exported(f"keyhole.{package}")
    ]


def _follow(module: str, name: str) -> Name:
    for node in ast.walk(tree(module)):
        if isinstance(node, Definition) and node.name == name:
            return Name(name, module, node)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith(
                    "keyhole"
                ):
                    return _follow(node.module, alias.name)
    return Name(name, module, None)


def page(package: str) -> str:
    """Return a package's page: its docstring, and each public name with signature and docstring."""
    module = f"keyhole.{package}"
    parts = [f"# {module}", prose(ast.get_docstring(tree(module)) or "")]
    for name in public_names(package):
        parts += [f"## {name.name}", *_described(name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(name: Name) -> Iterator[str]:
    if name.node is None:
        yield f"A constant of `{name.source}`."
        return
    yield f"```text\n{signature(name.node)}\n```"
    yield prose(ast.get_docstring(name.node) or _first_paragraph(name.module))
    if isinstance(name.node, ast.ClassDef):
        yield "\n".join(_fields(name.node))
        methods = [item for item in name.node.body if isinstance(item, ast.FunctionDef)]
        yield "\n".join(
            f"- `{member(method)}` {_one_line(ast.get_docstring(method) or '')}".rstrip()
            for method in methods
            if _shown(method)
        )
    yield f"`{name.source}`"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields that have a docstring, which is the statement after them."""
    for field, about in itertools.pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(about, ast.Expr):
            text = str(ast.literal_eval(about.value))
            yield f"- `{ast.unparse(field.target)}` {_one_line(text)}"


def member(method: ast.FunctionDef) -> str:
    """Return a method's call, or a property with its type."""
    decorators = {ast.unparse(item) for item in method.decorator_list}
    if decorators & {"property", "cached_property"}:
        if method.returns:
            return f"{method.name}: {ast.unparse(method.returns)}"
        return method.name
    parameters = [*_parameters(method.args)]
    if "staticmethod" not in decorators:
        del parameters[0]  # self
    returns = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    return f"{method.name}({', '.join(parameters)}){returns}"


def _shown(method: ast.FunctionDef) -> bool:
    return method.name == "__call__" or not method.name.startswith("_")


def signature(node: Definition) -> str:
    """Return the signature of a function, or a class with its fields."""
    if isinstance(node, ast.ClassDef):
        fields = [
            ast.unparse(item)
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and not ast.unparse(item.target).startswith("_")
        ]
        bases = ", ".join(map(ast.unparse, node.bases))
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        return "\n".join([head, *(f"    {field}" for field in fields)])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    parameters = [*_parameters(node.args)]
    call = f"{node.name}({', '.join(parameters)}){returns}"
    if len(call) <= 90:
        return call
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{node.name}(\n{lines}){returns}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Yield each parameter as written, with a star before those that are keyword-only."""
    given = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(given) - len(arguments.defaults))
    yield from map(_parameter, given, [*missing, *arguments.defaults])
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{_parameter(arguments.vararg, None) if arguments.vararg else ''}"
    yield from map(_parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    name = ast.unparse(argument)
    return f"{name} = {ast.unparse(default)}" if default else name


def prose(docstring: str) -> str:
    """Return a docstring as Markdown, with tags escaped and an empty line before each list."""
    lines = [
        line if line.startswith("    ") else TAG.sub(lambda tag: tag[1] or "&lt;", line)
        for line in docstring.splitlines()
    ]
    return re.sub(r"(?<!\n)\n(?=- )", "\n\n", "\n".join(lines))


def _first_paragraph(module: str) -> str:
    return (ast.get_docstring(tree(module)) or "").split("\n\n")[0]


def _one_line(docstring: str) -> str:
    return prose(" ".join(docstring.split("\n\n")[0].split()))


def index() -> str:
    """Return the first page of the reference: the package, and a list of its parts."""
    lines = [
        f"- [`keyhole.{name}`]({name}.md): {_one_line(_first_paragraph(f'keyhole.{name}'))}"
        for name in PACKAGES
    ]
    about = prose(ast.get_docstring(tree("keyhole")) or "")
    return "\n\n".join(["# keyhole", about, "\n".join(lines)]) + "\n"


def pages() -> dict[str, str]:
    """Return every page of the reference by its path in the site."""
    return {"api/index.md": index()} | {
        f"api/{name}.md": page(name) for name in PACKAGES
    }
