"""A planted target behind a real inference server: MLServer, Open Inference Protocol v2, FP64.

To try an audit over the network. Needs the extra `keyhole[serve]`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError
from mlserver.settings import ModelParameters
from mlserver.types import Datatype, InferenceRequest, InferenceResponse, MetadataTensor

from keyhole.errors import InputError, KeyholeError
from keyhole.oracle.degraded import Degradation
from keyhole.oracle.protocol import check_sequences
from keyhole.oracle.storage import load

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class TargetRuntime(MLModel):
    """MLServer's view of a target: load it once, answer batches of sequences."""

    async def load(self) -> bool:
        parameters = self.settings.parameters
        if parameters is None or parameters.uri is None:
            raise InputError("expected the path of a target in the model's settings, got none")
        self._target = Degradation.of(parameters.extra or {}).applied(load(parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        try:
            sequences = torch.as_tensor(NumpyCodec.decode_input(payload.inputs[0]))
            answers = self._target(check_sequences(sequences, self._target.dim))
        except (InputError, IndexError, ValueError) as error:
            raise InferenceError(str(error)) from error
        output = NumpyCodec.encode_output("answers", answers.numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])


def serve(
    path: str | Path,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    degradation: Degradation | None = None,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Serve the target in `path` until interrupted; `begun` is called when nothing is wrong.

    `degradation` is done to its answers, on top of what the file says.
    """
    target = load(path)
    if not _NAME.fullmatch(name):
        raise InputError(f"expected a name of letters, digits, '.', '_' and '-', got {name}")
    _expect_free(host, port)
    settings = Settings(
        host=host,
        http_port=port,
        grpc_port=_free_port(host),  # MLServer insists on one; nothing here speaks to it
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
    )
    model = ModelSettings(
        name=name,
        implementation=TargetRuntime,
        parameters=ModelParameters(
            uri=str(Path(path).resolve()), extra=(degradation or Degradation()).flags()
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
    # When interrupted, uvicorn reports the end of its own start-up task as an error.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno < logging.ERROR)
    await server.start([model])


def _expect_free(host: str, port: int) -> None:
    """MLServer's own server ends the process where it cannot listen, with nothing said."""
    if not 0 < port < 2**16:
        raise InputError(f"expected a port from 1 to {2**16 - 1}, got {port}")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"expected an address of this machine, got {host}: {why}") from error
    try:
        with socket.socket(address[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except OSError as error:
        raise KeyholeError(
            f"expected to listen on {host}:{port}, got {error.strerror}: try another --port"
        ) from error


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
