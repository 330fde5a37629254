"""`python leaking_server.py FOLDER PORT`: the targets of leaking_targets.py behind one MLServer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import Datatype, InferenceRequest, InferenceResponse, MetadataTensor

from leaking_targets import Case, opened
from servers import free_port


class Runtime(MLModel):
    """One target, answering in its form."""

    async def load(self) -> bool:
        file = Path(str(self.settings.parameters.uri))
        self._target = opened(Case.of(file), file.parent)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        answers = self._target(torch.as_tensor(NumpyCodec.decode_input(payload.inputs[0])))
        output = NumpyCodec.encode_output("answers", answers.numpy())
        return InferenceResponse(model_name=self.name, outputs=[output])


def settings_of(file: Path) -> ModelSettings:
    case = Case.of(file)
    dim = opened(case, file.parent).dim
    return ModelSettings(
        name=case.name,
        implementation=Runtime,
        parameters=ModelParameters(uri=str(file)),
        inputs=[MetadataTensor(name="sequences", datatype=Datatype.FP64, shape=[-1, -1, dim])],
        outputs=[MetadataTensor(name="answers", datatype=Datatype.FP64, shape=[-1])],
    )


async def serve(folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    settings = Settings(
        host="127.0.0.1", http_port=port, metrics_endpoint=None, parallel_workers=0, debug=False,
        grpc_port=free_port(),  # MLServer insists on one; nothing speaks to it
    )  # fmt: skip
    files = sorted(folder.glob("*.safetensors"))
    await MLServer(settings).start([settings_of(file) for file in files])


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
