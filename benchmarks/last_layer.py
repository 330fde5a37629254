"""The last layer of a language model behind llama.cpp's own server, from its log-probabilities.

SmolLM2-135M-Instruct (`--model FILE.gguf`) is served by xllamacpp on this machine and asked by
random prompts of four tokens. `whole`: all log-probabilities of an answer; `rounded`: the same
answers to 6 … 1 digits;
`--top 100,20`: the best k with a bias, for the width and the rows of as many tokens as that takes.
The truth is the file's own matrix, dequantised: the RMS of what the best linear map leaves of it.
`--quick` takes planted matrices in this process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.extract import Extraction, OutputLayer
from keyhole.extract.token_answers import distance, true_matrix
from keyhole.oracle import Counted, Ledger, Oracle, Rounded
from keyhole.oracle.completions import Completions
from keyhole.oracle.planted import OutputMatrix
from keyhole.oracle.token_questions import Logits
from servers import free_port
from show import Row

PARTS = ["whole", "rounded", "top"]
MOST, EXACT = 640, 1e-6  # queries, RMS
SERVER = """
import sys, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_ctx, p.n_parallel = sys.argv[1], int(sys.argv[2]), 256, 1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
for name, _, value in (setting.partition("=") for setting in sys.argv[3:]):
    if name == "slots":
        p.slot_save_path, p.swa_full = value, True
    elif name == "flash":
        p.flash_attn_type = int(value)
    elif name == "draft":
        p.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        p.speculative.ngram_simple.size_n, p.speculative.ngram_simple.size_m = 2, int(value)
    elif name == "cache":
        p.cache_type_k = p.cache_type_v = getattr(x.ggml_type, "GGML_TYPE_" + value)
    else:
        p.embedding = True
        p.pooling_type = getattr(x.llama_pooling_type, "LLAMA_POOLING_TYPE_" + value)
server = x.Server(p)
print("listening", flush=True)
sys.stdin.read()
"""


def run(
    quick: bool,
    model: Path | None = None,
    parts: list[str] = PARTS,
    length: int = 4,
    top: list[int] = [100],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    if quick:
        W, logits = small()
        yield from rows("planted", logits, W, 72, parts, length, top)
        return
    file = subjects.smollm2_file(model)
    W, tied = true_matrix(file)
    with (
        served(file) as url,
        tempfile.TemporaryDirectory() as folder,
        closing(Completions.at(url)) as server,
        Ledger(Counted(server), Path(folder) / "answers.db") as ledger,
    ):
        name = f"{file.stem}{', tied' if tied else ''}"
        yield from rows(name, ledger, W, MOST, parts, length, top)


def small() -> tuple[Tensor, Oracle]:
    """A matrix of 400 tokens behind a norm; answers of float32, as a server prints them."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((400, 48), (400, 24), (96, 48))
    W, table, mix = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes)

    def logits(ids: Tensor) -> Tensor:
        x = torch.tanh(table[ids].flatten(1) @ mix)
        states = x / x.square().mean(1, keepdim=True).sqrt()
        return (states @ W.T).log_softmax(1).float().double()

    return W, Logits(logits)


def rows(
    name: str, target: Oracle, W: Tensor, most: int, parts: list[str], length: int, top: list[int]
) -> Iterator[Row]:
    if "whole" in parts:
        yield from whole(name, target, W, most, length)
    if "rounded" in parts:
        for decimals in range(6, 0, -1):
            yield rounded(name, target, W, decimals)
    for count in top if "top" in parts else ():
        yield chosen(name, target, W, count)


def whole(name: str, target: Oracle, W: Tensor, most: int, length: int) -> Iterator[Row]:
    result, seconds = show.timed(lambda: OutputLayer(length=length)(target))
    layer, total = result.layer, cost(result)
    assert layer is not None
    rms, relative = error(result, W)
    details = f"singular values {layer.above:.1e}, then {layer.below:.1e}; {result.status}"
    yield show.exactly(f"{name}: width", result.width, W.shape[1], details)
    details = f"{relative:.1e} of the matrix's own"
    yield show.at_most(f"{name}: RMS after alignment", rms, EXACT, details)
    yield Row(f"{name}: queries", f"{total}", f"<= {most}", total <= most,
              f"{result.queries} of them the attack's, the others the judge's")  # fmt: skip
    yield Row(f"{name}: time", f"{seconds:.0f} s", details=f"{seconds / total:.2f} s a query")


def rounded(name: str, target: Oracle, W: Tensor, decimals: int) -> Row:
    result = OutputLayer(most=4 * W.shape[1])(Rounded(target, decimals))
    digits = f"{decimals} digit{'s' if decimals > 1 else ''}"
    what = f"{name}: rounded to {digits}"
    if result.layer is None or result.width is None:
        return Row(what, f"no width: {result.reason}")
    rms, relative = error(result, W)
    layer = result.layer
    return Row(what, f"width {result.width}, RMS {rms:.1e}", f"width {W.shape[1]}",
               result.width == W.shape[1],
               f"{cost(result)} queries; {relative:.1e} of the matrix's own; singular values "
               f"{layer.above:.1e}, then {layer.below:.1e}; {result.status}")  # fmt: skip


def chosen(name: str, target: Oracle, W: Tensor, top: int) -> Row:
    result, seconds = show.timed(lambda: OutputLayer(top=top)(target))
    what = f"{name}: the best {top} with a bias"
    if result.layer is None:
        return Row(what, f"no width: {result.reason}", met=False)
    rms, relative = error(result, W)
    return Row(what, f"width {result.width}, {cost(result):,} queries", f"width {W.shape[1]}",
               result.width == W.shape[1],
               f"rows of {result.layer.tokens:,} tokens, RMS {rms:.1e}, {relative:.1e} of their "
               f"own; {seconds:.0f} s; {result.status}")  # fmt: skip


def cost(result: Extraction) -> int:
    return result.queries + (0 if result.check is None else result.check.queries)


def error(result: Extraction, W: Tensor) -> tuple[float, float]:
    assert isinstance(result.model, OutputMatrix)
    return distance(result.model, W, centred=True)


@contextmanager
def served(file: Path, *settings: str) -> Generator[str]:
    """llama.cpp's server; `settings` are what SERVER reads of them, such as slots=FOLDER."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(file), str(port), *settings]
    quiet = {"stderr": subprocess.DEVNULL, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **quiet) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "listening":
                raise SystemExit(f"xllamacpp does not serve {file}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


if __name__ == "__main__":
    show.main(run)
