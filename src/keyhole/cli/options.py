"""Options that several commands share, and commands whose options a dataclass declares.

What `AuditOptions` declares (audit/options.py) has its help there, for every command that takes it.
Hyperparameters are given as `-o name=value`; `method_options` reads them by the fields of the
method's dataclass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer
from rich.markup import escape

from keyhole.audit.options import AuditOptions
from keyhole.core.endpoint import EndpointOptions, headers_of
from keyhole.core.options import (
    CHECKS,
    DATA,
    ENDPOINT,
    OUTPUT,
    SCALE,
    TARGET,
    Declared,
    option,
    options_of,
    settings,
    types_of,
)

if TYPE_CHECKING:
    from keyhole.core.registry import Entry, Registry

_HEADER_HELP = (
    "Send the header NAME with what the environment variable VARIABLE holds, such as "
    "Authorization=MY_TOKEN; may be given several times. Endpoints are sent KEYHOLE_API_KEY, if it "
    "is set, as the bearer token."
)
_ENDPOINT_HELP = (
    "Set what is asked of an endpoint: batch (sequences in a request), timeout (seconds, 60 if not "
    "given), dim (the width of a token, where it is not stated), input and output (names of "
    "tensors, where there are several), positive (the label that counts as 1). May be repeated."
)
_OPTION_HELP = (
    "Set a hyperparameter of the method, such as rank=4 (`keyhole lab methods NAME` lists them), "
    "or what the command's description names; may be repeated."
)

_AUDIT = options_of(AuditOptions)


def about(
    help: str,  # noqa: A002 - as Typer calls it
    group: str,
    *names: str,
    metavar: str | None = None,
    **more: Any,
) -> Any:
    """An option with its help and the group that it is shown in."""
    return typer.Option(
        *names, help=escape(help), rich_help_panel=group, metavar=metavar, **more
    )  # fmt: skip


def declared(name: str) -> Any:
    """An option as the audit declares it."""
    return _option(_AUDIT[name])


def _option(declared: Declared) -> Any:
    shown = declared.about
    names = [f"--{declared.name.replace('_', '-')}"] if declared.type is bool else []
    more: dict[str, Any] = {} if shown.parse is None else {"parser": shown.parse}
    return about(shown.help, shown.group, *names, metavar=shown.metavar, **more)


def _as_audit(name: str) -> Any:
    """A field that is the same option as the audit's."""
    return field(default=_AUDIT[name].default, metadata={"option": _AUDIT[name].about})


@dataclass(frozen=True)
class ExampleOptions:
    """The examples that a classifier is attacked or trained with, and how it is loaded."""

    column: tuple[str, ...] = option(
        (), "The column that holds the text; give it twice for a pair of texts.", DATA,
        metavar="NAME",
    )  # fmt: skip
    label: str | None = _as_audit("label")
    classes: str | None = option(
        None, "Names of the classes, such as no,yes, where the model does not name them.", DATA
    )
    examples: int | None = option(None, "Take only this many examples, the first ones.", DATA)
    max_length: int = option(128, "Cut texts off after this many tokens.", DATA)
    allow_pickle: bool = option(
        False, "Open pickled weights, which can run code: only where you trust their source.",
        TARGET,
    )  # fmt: skip
    device: str = _as_audit("device")

    def keywords(self) -> dict[str, Any]:
        """As `disrupt.run`, `harden.run` and `certify_all` take them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given["text"] = given.pop("column") or ()
        given["classes"] = self.classes.split(",") if self.classes else ()
        return given


_EXAMPLES = options_of(ExampleOptions)
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub name, or demo.")
]
ProblemFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROBLEM", help="A .safetensors file with W, V, B (and maps, if they leaked)."
    ),
]
Data = Annotated[
    str | None,
    about(
        "The examples: .tsv, .csv, .jsonl, .json (HellaSwag, DREAM, ReClor), .txt, or a dataset's "
        "name on the hub.",
        DATA,
        metavar="FILE",
    ),
]
Corpus = Annotated[Path | None, declared("corpus")]
Method = Annotated[
    str | None, about("The method; `keyhole lab methods` lists them.", CHECKS, metavar="NAME")
]
MethodOptions = Annotated[
    list[str] | None, about(_OPTION_HELP, CHECKS, "--option", "-o", metavar="NAME=VALUE")
]
Seed = Annotated[int, declared("seed")]
Device = Annotated[str, declared("device")]
AllowPickle = Annotated[bool, _option(_EXAMPLES["allow_pickle"])]
Examples = Annotated[int | None, _option(_EXAMPLES["examples"])]
Authorized = Annotated[bool, declared("authorized")]
Ledger = Annotated[Path | None, declared("ledger")]
Processes = Annotated[int, about("How many processes; 0 = in-process (use on a GPU).", SCALE)]
Dask = Annotated[
    str | None, about("Work on a Dask cluster, such as tcp://host:8786.", SCALE, metavar="ADDRESS")
]
Resume = Annotated[
    Path | None,
    about(
        "Keep what is finished in this file (harden: folder); the same command resumes from it.",
        OUTPUT,
        metavar="PATH",
    ),
]
Out = Annotated[
    Path | None,
    about("Save the result as JSON, with its tensors next to it.", OUTPUT, metavar="FILE"),
]
Force = Annotated[bool, about("Replace existing files.", OUTPUT, "--force")]
Json = Annotated[bool, about("Print the result as JSON instead of text.", OUTPUT, "--json")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of its dataclasses in place of the parameters that hold them."""
    signature = inspect.signature(command, eval_str=True)
    classes: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, options in classes.items():
            given[name] = _built(options, given)
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in classes:
            parameters += _parameters(classes[name])
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return called


def _parameters(options: type[Any]) -> list[inspect.Parameter]:
    """The options of a dataclass, and of the endpoint in it, as Typer reads them."""
    found = [
        _parameter(
            each.name, _typer_type(each), None if each.default == () else each.default,
            _option(each),
        )
        for each in options_of(options).values()
    ]  # fmt: skip
    if options is EndpointOptions:
        several = list[str] | None
        header = about(_HEADER_HELP, ENDPOINT, metavar="NAME=VARIABLE")
        setting = about(_ENDPOINT_HELP, ENDPOINT, metavar="NAME=VALUE")
        found.append(_parameter("header", several, None, header))
        found.append(_parameter("endpoint", several, None, setting))
    elif _has_endpoint(options):
        found += _parameters(EndpointOptions)
    return found


def _has_endpoint(options: type[Any]) -> bool:
    return "endpoint" in (each.name for each in fields(options))


def _parameter(name: str, kind: Any, default: Any, shown: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def _typer_type(declared: Declared) -> Any:
    """What Typer calls the type of a field: it knows lists, and a parser takes any word."""
    if declared.about.parse is not None:
        return str | None
    return list[str] | None if get_origin(declared.type) is tuple else declared.type


def _built(options: type[Any], given: dict[str, Any]) -> Any:
    """The dataclass from the options of the command line, which are taken from `given`."""
    values: dict[str, Any] = {}
    if options is EndpointOptions:
        words = given.pop("endpoint") or ()
        values["headers"] = headers_of(given.pop("header") or ())
        flags = (*options_of(options), "headers")
        values |= settings(words, types_of(EndpointOptions, hidden=flags), "--endpoint")
    elif _has_endpoint(options):
        values["endpoint"] = _built(EndpointOptions, given)
    values |= {name: given.pop(name) for name in options_of(options)}
    return options(**values)


SET_ELSEWHERE = ("seed", "device", "corpus")  # by options of the command, not as -o


def method_options(
    registry: Registry[Any, Any], name: str, words: Sequence[str] | None
) -> dict[str, Any]:
    """The hyperparameters of a method that were given as -o name=value."""
    return settings(words or (), option_types(registry[name]), registry[name].name)


def option_types(entry: Entry[Any, Any]) -> dict[str, Any]:
    """What -o sets of a method; tensors are given as a file that holds them."""
    types = types_of(entry.make, hidden=SET_ELSEWHERE)
    return types | ({"bases": Path} if "bases" in entry.options else {})
