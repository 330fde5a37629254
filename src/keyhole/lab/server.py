"""Serves a planted target with MLServer (Open Inference Protocol v2, FP64), to try attacks on.

Needs the extra `keyhole[serve]`, so only the command `keyhole lab serve` imports it.
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
from mlserver.errors import InferenceError, MLServerError
from mlserver.settings import ModelParameters
from mlserver.types import Datatype, InferenceRequest, InferenceResponse, MetadataTensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.oracle.defences import Degradation
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import check_sequences
from keyhole.oracle.storage import load

_HOST = "127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class TargetRuntime(MLModel):
    """A target as a model of MLServer: loads it once, and answers batches of sequences."""

    async def load(self) -> bool:
        parameters = self.settings.parameters
        if parameters is None or parameters.uri is None:
            raise InputError(
                "the model's settings name no target: set parameters.uri to its file"
            )
        self._target = Degradation.of(parameters.extra or {}).applied(
            load(parameters.uri)
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        try:
            sequences = torch.as_tensor(NumpyCodec.decode_input(payload.inputs[0]))
            answers = self._target(check_sequences(sequences, self._target.dim))
        except Refused as refused:
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
    begun: Callable[[], None],
) -> None:
    """Serve the target in `path` until interrupted; `begun` is called before the server starts.

    `degradation` changes its answers, in addition to the degradation in the file.
    """
    target = load(path)
    if not _NAME.fullmatch(name):
        raise InputError(
            f"a name consists of letters, digits, '.', '_' and '-': got {name}"
        )
    _expect_free(port)
    settings = Settings(
        host=_HOST,
        http_port=port,
        grpc_port=_free_port(),  # MLServer needs one, although nothing uses it
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
    )
    model = ModelSettings(
        name=name,
        implementation=TargetRuntime,
        parameters=ModelParameters(
            uri=str(Path(path).resolve()),
            extra={**degradation.to_flags()},
        ),
        inputs=[
            MetadataTensor(
                name="sequences", datatype=Datatype.FP64, shape=[-1, -1, target.dim]
            )
        ],
        outputs=[MetadataTensor(name="answers", datatype=Datatype.FP64, shape=[-1])],
    )
    begun()
    asyncio.run(_run(settings, model))


async def _run(settings: Any, model: Any) -> None:
    server = MLServer(settings)
    # When interrupted, uvicorn reports the end of its own start-up task as an error.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: record.levelno < logging.ERROR
    )
    await server.start([model])


def _expect_free(port: int) -> None:
    """Raise if MLServer cannot listen at the port: it would exit without a message."""
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
