"""Options that several commands share, and commands whose options are declared as dataclasses.

A command takes its options in three forms: as parameters of the types below, as
parameters whose default is `option(…)`, and as dataclasses such as `AuditOptions`,
whose fields become options. Typer knows only the first, so `with_options` turns the
other two into it. Hyperparameters are given as `-o name=value`; `method_options` reads
them by the fields of the method's dataclass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
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
    Option,
    declared,
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

_ENDPOINT_FLAGS = tuple(
    Option(help_, ENDPOINT, metavar, name=name, type=tuple[str, ...], default=())
    for name, help_, metavar in (
        ("header", _HEADER_HELP, "NAME=VARIABLE"),
        ("endpoint", _ENDPOINT_HELP, "NAME=VALUE"),
    )
)
_AUDIT = options_of(AuditOptions)


def about(
    help: str,  # noqa: A002 - as Typer calls it
    group: str,
    *names: str,
    metavar: str | None = None,
    **more: Any,
) -> Any:
    """Return Typer's description of an option, which the help shows in a group."""
    return typer.Option(
        *names, help=escape(help), rich_help_panel=group, metavar=metavar, **more
    )


def of_audit(name: str) -> Any:
    """Return Typer's description of an option of the audit."""
    return _described(_AUDIT[name])


def _described(option: Option) -> Any:
    names: list[str] = []
    if option.type is bool:  # with its name given, it has no flag --no-NAME
        names.append(f"--{option.name.replace('_', '-')}")
    more: dict[str, Any] = {}
    if option.parse is not None:
        more["parser"] = option.parse
    return about(option.help, option.group, *names, metavar=option.metavar, **more)


def _same_as_audit(name: str) -> Any:
    """Declare a field as the audit's option of this name."""
    return field(default=_AUDIT[name].default, metadata={"option": _AUDIT[name]})


@dataclass(frozen=True)
class ExampleOptions:
    """The examples that a classifier is attacked or trained with, and how it is loaded."""

    column: tuple[str, ...] = option(
        (),
        "The column that holds the text; give it twice for a pair of texts.",
        DATA,
        metavar="NAME",
    )
    label: str | None = _same_as_audit("label")
    classes: str | None = option(
        None,
        "Names of the classes, such as no,yes, where the model does not name them.",
        DATA,
    )
    examples: int | None = option(
        None, "Take only this many examples, the first ones.", DATA
    )
    max_length: int = option(128, "Cut texts off after this many tokens.", DATA)
    allow_pickle: bool = _same_as_audit("allow_pickle")
    device: str = _same_as_audit("device")

    def keywords(self) -> dict[str, Any]:
        """Return the options as `disrupt.run`, `harden.run` and `certify_all` take them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given["text"] = given.pop("column") or ()
        given["classes"] = [*filter(None, (self.classes or "").split(","))]
        return given


_EXAMPLES = options_of(ExampleOptions)
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a .gguf file, a hub name, or demo."
    ),
]
ProblemFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROBLEM",
        help="A .safetensors file with W, V, B (and maps, if they leaked).",
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
Corpus = Annotated[Path | None, of_audit("corpus")]
Method = Annotated[
    str | None,
    about("The method; `keyhole lab methods` lists them.", CHECKS, metavar="NAME"),
]
MethodOptions = Annotated[
    list[str] | None,
    about(_OPTION_HELP, CHECKS, "--option", "-o", metavar="NAME=VALUE"),
]
Seed = Annotated[int, of_audit("seed")]
Device = Annotated[str, of_audit("device")]
AllowPickle = Annotated[bool, _described(_EXAMPLES["allow_pickle"])]
Examples = Annotated[int | None, _described(_EXAMPLES["examples"])]
Authorized = Annotated[bool, of_audit("authorized")]
Ledger = Annotated[Path | None, of_audit("ledger")]
Processes = Annotated[
    int, about("How many processes; 0 = in-process (use on a GPU).", SCALE)
]
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
    about(
        "Save the result as JSON, with its tensors next to it.", OUTPUT, metavar="FILE"
    ),
]
Force = Annotated[bool, about("Replace existing files.", OUTPUT, "--force")]
Json = Annotated[
    bool, about("Print the result as JSON instead of text.", OUTPUT, "--json")
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a signature that Typer can read: one parameter for each option."""
    signature = inspect.signature(command, eval_str=True)
    classes: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        default = parameter.default
        if is_dataclass(kind):
            classes[name] = kind
            parameters += _parameters(kind)
        elif isinstance(default, Field) and (option := declared(default, name, kind)):
            parameters.append(_parameter(option))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, options in classes.items():
            given[name] = _built(options, given)
        command(**given)

    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def _parameters(options: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each option of a dataclass and of the endpoint in it."""
    yield from map(_parameter, options_of(options).values())
    if options is EndpointOptions:
        yield from map(_parameter, _ENDPOINT_FLAGS)
    elif _has_endpoint(options):
        yield from _parameters(EndpointOptions)


def _has_endpoint(options: type[Any]) -> bool:
    return "endpoint" in (each.name for each in fields(options))


def _parameter(option: Option) -> inspect.Parameter:
    kind = option.type
    default = option.default
    if option.parse is not None:  # it reads the word itself
        kind = str | None
    elif get_origin(kind) is tuple:
        kind = list[str] | None
        default = default or None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, _described(option)],
    )


def _built(options: Any, given: dict[str, Any]) -> Any:
    """Make a dataclass from options of the command line, which are removed from `given`."""
    values: dict[str, Any] = {}
    if options is EndpointOptions:
        words = given.pop("endpoint")
        values["headers"] = headers_of(given.pop("header") or ())
        # --endpoint sets the fields that have no flag of their own.
        types = types_of(EndpointOptions, hidden=(*options_of(options), "headers"))
        values |= settings(words, types, "--endpoint")
    elif _has_endpoint(options):
        values["endpoint"] = _built(EndpointOptions, given)
    values |= {name: given.pop(name) for name in options_of(options)}
    return options(**values)


# Hyperparameters that have flags, and are not set by -o.
_OWN_FLAGS = ("seed", "device", "corpus")


def method_options(
    registry: Registry[Any, Any],
    name: str,
    words: Sequence[str] | None,
) -> dict[str, Any]:
    """Read the hyperparameters of a method that were given as -o name=value."""
    return settings(words, option_types(registry[name]), registry[name].name)


def option_types(entry: Entry[Any, Any]) -> dict[str, Any]:
    """Return the types of the hyperparameters that -o sets; the tensors `bases` are in a file."""
    types = types_of(entry.make, hidden=_OWN_FLAGS)
    if "bases" in entry.options:
        types["bases"] = Path
    return types
