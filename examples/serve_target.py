"""A planted target behind a real inference server (MLServer), to try attacks on.

MLServer (`pip install mlserver`) takes Python 3.12 or older, and speaks the Open
Inference Protocol v2 in FP64, as Triton, KServe and OpenVINO do.

    keyhole lab plant target.safetensors -o dim=8
    python examples/serve_target.py target.safetensors --name head -o decimals=3 &
    keyhole extract http://127.0.0.1:8080/v2/models/head

`-o` changes answers: sign_only, decimals, noise (drawn from seed, the same whenever a
question is repeated), fresh_noise (new each time), max_norm (longer tokens are shortened); or
refuses questions: min_tokens, max_tokens, usual_norm (of honest clients' tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError, MLServerError
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor

from keyhole import oracle
from keyhole.core.errors import InputError
from keyhole.oracle.protocol import check_sequences

HOST = "127.0.0.1"


class TargetRuntime(MLModel):
    """A target as a model of MLServer: loads it once, and answers batches of sequences."""

    async def load(self) -> bool:
        parameters = self.settings.parameters
        defence = oracle.Defence.of_answers(parameters.extra["defences"])
        self.target = oracle.defended(oracle.load(parameters.uri), defence)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        try:
            sequences = torch.as_tensor(NumpyCodec.decode_input(payload.inputs[0]))
            answers = self.target(check_sequences(sequences, self.target.dim))
        except oracle.Refused as refused:
            raise MLServerError(str(refused), refused.status) from refused
        except (InputError, IndexError, ValueError) as error:
            raise InferenceError(str(error)) from error
        output = NumpyCodec.encode_output("answers", answers.numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])


def settings_of(path: Path, name: str, defences: list[str]) -> ModelSettings:
    """Return the model of the target in a file, behind these defences."""
    shape = [-1, -1, oracle.load(path).dim]
    return ModelSettings(
        name=name,
        implementation=TargetRuntime,
        parameters=ModelParameters(
            uri=str(path.resolve()), extra={"defences": defences}
        ),
        inputs=[MetadataTensor(name="sequences", datatype="FP64", shape=shape)],
        outputs=[MetadataTensor(name="answers", datatype="FP64", shape=[-1])],
    )


async def serve(model: ModelSettings, port: int) -> None:
    with socket.socket() as free:  # MLServer needs a port for gRPC, which nothing uses
        free.bind((HOST, 0))
        unused = free.getsockname()[1]
    settings: Any = Settings(
        host=HOST,
        http_port=port,
        grpc_port=unused,
        metrics_endpoint=None,
        parallel_workers=0,
        debug=False,
    )
    server = MLServer(settings)
    # When interrupted, uvicorn reports the end of its own start-up task as an error.
    quiet = logging.getLogger("uvicorn.error")
    quiet.addFilter(lambda record: record.levelno < logging.ERROR)
    await server.start([model])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="a file of keyhole lab plant")
    parser.add_argument("--name", default="target", help="of the model on the server")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-o", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    try:
        oracle.Defence.of_answers(given.o)
        model = settings_of(given.target, given.name, given.o)
        socket.create_server((HOST, given.port)).close()  # MLServer would exit silently
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    url = f"http://{HOST}:{given.port}/v2/models/{given.name}"
    print(f"serving {given.target} at {url} (Ctrl-C ends it)", flush=True)
    asyncio.run(serve(model, given.port))


if __name__ == "__main__":
    main()
