"""The options of every command that asks an endpoint: written once, given as one object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.core.endpoint import EndpointOptions, headers_of

_TENSOR = "of an endpoint with several"

OPTIONS: dict[str, Any] = {
    "header": Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VARIABLE",
            help="Send the header NAME with what the environment variable VARIABLE holds, such as "
            "Authorization=MY_TOKEN; may be given several times. Endpoints are sent "
            "KEYHOLE_API_KEY, if it is set, as the bearer token.",
        ),
    ],
    "ca": Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificates (PEM) to trust instead of the usual ones."),
    ],
    "insecure": Annotated[
        bool, typer.Option("--insecure", help="Trust any certificate of an endpoint.")
    ],
    "batch": Annotated[
        int | None,
        typer.Option(help="Ask an endpoint at most this many sequences in one request."),
    ],
    "rate": Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND", help="Send an endpoint at most this many requests a second."
        ),
    ],
    "timeout": Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long one request with its retries may take, 60 if not given.",
        ),
    ],
    "dim": Annotated[
        int | None,
        typer.Option(help="The width of a token, where the endpoint does not state it."),
    ],
    "input": Annotated[
        str | None,
        typer.Option(
            "--input-tensor", "--input", metavar="NAME", help=f"The input to ask, {_TENSOR}."
        ),
    ],
    "output": Annotated[
        str | None,
        typer.Option("--output-tensor", metavar="NAME", help=f"The output to read, {_TENSOR}."),
    ],
    "positive": Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="The label that counts as 1, where answers are words."),
    ],
    "authorized": Annotated[
        bool,
        typer.Option(
            "--authorized", help="State that you may test the server, which is not on this machine."
        ),
    ],
}
_FLAGS = ("insecure", "authorized")
_FIELDS = [name for name in OPTIONS if name not in ("header", "authorized")]


class asks_endpoint:  # noqa: N801 - a decorator
    """A command with these options instead of its parameter `endpoint`, which they become."""

    def __init__(self, command: Callable[..., None]) -> None:
        functools.update_wrapper(self, command)
        self._command = command

    def __call__(self, *, header: list[str] | None, **words: Any) -> None:
        about = {name: words.pop(name) for name in _FIELDS}
        self._command(endpoint=EndpointOptions(headers=headers_of(header or ()), **about), **words)

    @property
    def __signature__(self) -> inspect.Signature:
        """What Typer reads, each time it does: registries may have grown since the import."""
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(self._command, eval_str=True).parameters.values():
            if parameter.name == "endpoint":
                parameters += [
                    inspect.Parameter(
                        name, parameter.KEYWORD_ONLY, annotation=kind,
                        default=False if name in _FLAGS else None,
                    )
                    for name, kind in OPTIONS.items()
                ]  # fmt: skip
            elif parameter.name not in OPTIONS:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
        return inspect.Signature(parameters)
