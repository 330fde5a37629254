"""A planted target behind a real inference server: MLServer, Open Inference Protocol v2, FP64.

To try an audit over the network. Needs the extra `keyhole[serve]`. What each client may ask is
counted by its address (oracle/defences.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError, MLServerError
from mlserver.settings import ModelParameters
from mlserver.types import Datatype, InferenceRequest, InferenceResponse, MetadataTensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.oracle.defences import Degradation, Rationed, TooFast
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import check_sequences
from keyhole.oracle.storage import load

_HOST = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


Message = MutableMapping[str, Any]


@dataclass
class _Visit:
    """One request: whose it is, and for how long (s) its sender has to wait, if too fast."""

    client: str = ""
    wait: float | None = None


_visit: ContextVar[_Visit | None] = ContextVar("visit", default=None)


class Visits:
    """ASGI middleware: MLServer tells a model the question, but not who asks."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]
    ) -> None:
        visit = _Visit((scope.get("client") or ("",))[0])
        _visit.set(visit)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and visit.wait is not None:
                header = (b"retry-after", str(math.ceil(visit.wait)).encode())
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, sent)


class TargetRuntime(MLModel):
    """MLServer's view of a target: load it once, answer batches of sequences."""

    async def load(self) -> bool:
        parameters = self.settings.parameters
        if parameters is None or parameters.uri is None:
            raise InputError("the model's settings name no target: set parameters.uri to its file")
        extra = parameters.extra or {}
        served = Degradation.of(extra).applied(load(parameters.uri))
        self._target = Rationed(served, extra.get("client_budget"), extra.get("client_rate"))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        visit = _visit.get() or _Visit()
        try:
            sequences = torch.as_tensor(NumpyCodec.decode_input(payload.inputs[0]))
            answers = self._target(check_sequences(sequences, self._target.dim), visit.client)
        except Refused as refused:
            visit.wait = refused.wait if isinstance(refused, TooFast) else None
            raise MLServerError(str(refused), refused.status) from refused
        except (InputError, IndexError, ValueError) as error:
            raise InferenceError(str(error)) from error
        output = NumpyCodec.encode_output("answers", answers.numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])


def serve(
    path: str | Path,
    *,
    name: str,
    port: int,
    degradation: Degradation,
    client_budget: int | None,
    client_rate: float | None,
    begun: Callable[[], None],
) -> None:
    """Serve the target in `path` until interrupted; `begun` is called when nothing is wrong.

    `degradation` is done to its answers, on top of what the file says. A client, which is an
    address, may ask `client_budget` queries in all and `client_rate` a second.
    """
    target = load(path)
    Rationed(target, client_budget, client_rate)  # refuses numbers that make no sense
    if not _NAME.fullmatch(name):
        raise InputError(f"a name consists of letters, digits, '.', '_' and '-': got {name}")
    _expect_free(port)
    settings = Settings(
        host=_HOST,
        http_port=port,
        grpc_port=_free_port(),  # MLServer insists on one; nothing here speaks to it
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
    )
    model = ModelSettings(
        name=name,
        implementation=TargetRuntime,
        parameters=ModelParameters(
            uri=str(Path(path).resolve()),
            extra={
                **degradation.flags(),
                "client_budget": client_budget,
                "client_rate": client_rate,
            },
        ),
        inputs=[
            MetadataTensor(name="sequences", datatype=Datatype.FP64, shape=[-1, -1, target.dim])
        ],
        outputs=[MetadataTensor(name="answers", datatype=Datatype.FP64, shape=[-1])],
    )
    begun()
    asyncio.run(_run(settings, model))


async def _run(settings: Any, model: Any) -> None:
    server = MLServer(settings)
    # MLServer has no public way to its application, and no other way to a client's address.
    server._rest_server._app.add_middleware(Visits)  # pyright: ignore[reportPrivateUsage]
    # When interrupted, uvicorn reports the end of its own start-up task as an error.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno < logging.ERROR)
    await server.start([model])


def _expect_free(port: int) -> None:
    """MLServer's own server ends the process where it cannot listen, without a message."""
    if not 0 < port < 2**16:
        raise InputError(f"the port must lie between 1 and {2**16 - 1}: got {port}")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
    except OSError as error:
        raise KeyholeError(
            f"cannot listen on {_HOST}:{port} ({error.strerror}): try another --port"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
