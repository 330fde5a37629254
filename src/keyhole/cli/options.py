"""Options that several commands share, and commands whose options a dataclass declares.

What `AuditOptions` declares (audit/options.py) has its help there, for every command that takes it.
Hyperparameters are given as `-o name=value`; `method_options` reads them by the fields of the
method's dataclass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
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
    return _option(options_of(AuditOptions)[name])


def _option(option: Declared) -> Any:
    names = [f"--{option.name.replace('_', '-')}"] if option.type is bool else []
    more: dict[str, Any] = {} if option.about.parse is None else {"parser": option.about.parse}
    return about(
        option.about.help, option.about.group, *names, metavar=option.about.metavar, **more
    )


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub name, or demo.")
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
TextColumns = Annotated[
    list[str] | None,
    about("The column that holds the text; give it twice for a pair of texts.", DATA, "--column"),
]
Label = Annotated[str | None, declared("label")]
Classes = Annotated[
    str | None,
    about("Names of the classes, such as no,yes, where the model does not name them.", DATA),
]
Examples = Annotated[int | None, about("Take only this many examples, the first ones.", DATA)]
MaxLength = Annotated[int, about("Cut texts off after this many tokens.", DATA)]
Corpus = Annotated[Path | None, declared("corpus")]
Method = Annotated[
    str | None, about("The method; `keyhole lab methods` lists them.", CHECKS, metavar="NAME")
]
MethodOptions = Annotated[
    list[str] | None, about(_OPTION_HELP, CHECKS, "--option", "-o", metavar="NAME=VALUE")
]
Seed = Annotated[int, declared("seed")]
Device = Annotated[str, declared("device")]
AllowPickle = Annotated[
    bool,
    about(
        "Open pickled weights, which can run code: only where you trust their source.",
        TARGET,
        "--allow-pickle",
    ),
]
Authorized = Annotated[bool, declared("authorized")]
Ledger = Annotated[Path | None, declared("ledger")]
Processes = Annotated[int, about("How many processes; 0 = in-process (use on a GPU).", SCALE)]
Dask = Annotated[
    str | None,
    about("Work on a Dask cluster, such as tcp://host:8786.", SCALE, metavar="ADDRESS"),
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
            option.name,
            _typer_type(option),
            option.default if option.default != () else None,
            _option(option),
        )
        for option in options_of(options).values()
    ]
    if options is EndpointOptions:
        found += [
            _parameter(
                "header",
                list[str] | None,
                None,
                about(_HEADER_HELP, ENDPOINT, metavar="NAME=VARIABLE"),
            ),
            _parameter(
                "endpoint",
                list[str] | None,
                None,
                about(_ENDPOINT_HELP, ENDPOINT, metavar="NAME=VALUE"),
            ),
        ]
    elif "endpoint" in (field.name for field in fields(options)):
        found += _parameters(EndpointOptions)
    return found


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _typer_type(option: Declared) -> Any:
    """What Typer calls the type of a field: it knows lists, and a parser takes any word."""
    if option.about.parse is not None:
        return str | None
    return list[str] | None if get_origin(option.type) is tuple else option.type


def _built(options: type[Any], given: dict[str, Any]) -> Any:
    """The dataclass from the options of the command line, which are taken from `given`."""
    values: dict[str, Any] = {}
    if options is EndpointOptions:
        words = given.pop("endpoint") or ()
        values["headers"] = headers_of(given.pop("header") or ())
        flags = (*options_of(options), "headers")
        values |= settings(words, types_of(EndpointOptions, hidden=flags), "--endpoint")
    elif "endpoint" in (field.name for field in fields(options)):
        values["endpoint"] = _built(EndpointOptions, given)
    for name in options_of(options):
        values[name] = given.pop(name)
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
