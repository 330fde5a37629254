"""An oracle behind a server that speaks the Open Inference Protocol v2.

MLServer, Triton, KServe and OpenVINO all do. Questions travel as JSON numbers, which carry a
float64 exactly; where the server states a shorter format, they are rounded to that. A long batch is
spread over requests, several of them at a time on connections that stay open.

The server is not trusted: what it may cost is bounded by `Limits` (60 s and 64 MiB a request,
dimensions to 16,384), and an answer that does not fit the question is refused in one line. Each
request has a number, which servers repeat in the answer: one that comes twice or late is not taken
for that of another question.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.oracle.address import names_address, without_password
from keyhole.oracle.bodies import Limits, shown
from keyhole.oracle.options import connected
from keyhole.oracle.protocol import OracleError, check_sequences
from keyhole.oracle.replies import Replies, expect_model
from keyhole.oracle.tensors import FLOATS, chosen_input, most_at_once, named, stated

_DIGITS = 25  # bytes that a float64 takes in JSON, at most
_NUMBERS = 2**18  # in one question: several are under way at a time
_BATCH = 512


class OpenInference:
    """The model `model` at `url`; what `options` leaves open is read from the server.

    `dim`, `batch`, `timeout` and `headers` are for short: `options` has them and more. `headers`
    here are values, not names of variables. `limits` bounds what the server may cost; a `dim` that
    is given may exceed `limits.dim`. `connections` is how many requests are under way at a time.
    """

    may_change = True  # another model may stand behind the same address tomorrow

    def __init__(
        self,
        url: str,
        model: str,
        *,
        dim: int | None = None,
        batch: int | None = None,
        timeout: float | None = None,
        retries: int = 8,
        headers: dict[str, str] | None = None,
        limits: Limits | None = None,
        connections: int = 4,
        options: EndpointOptions | None = None,
    ) -> None:
        if not names_address(url):
            raise InputError(f"expected a URL such as http://localhost:8080, got {url}")
        expect_count("retries", retries, 0)
        expect_count("connections", connections)
        given = {"dim": dim, "batch": batch, "timeout": timeout}
        options = replace(
            options or EndpointOptions(),
            **{name: value for name, value in given.items() if value is not None},
        )
        address = f"{url.rstrip('/')}/v2/models/{model}"
        self.url = without_password(address)
        self._name = unquote(model.partition("/")[0])  # what follows may be a version
        self._options, self._connections = options, connections
        self._http = connected(options, address, limits=limits, retries=retries, headers=headers)
        try:
            self._inspect()
        except BaseException:
            self.close()
            raise

    def _inspect(self) -> None:
        """Read what the server states of the model, once it is ready."""
        metadata = self._http.request("GET", self.url)
        expect_model(self._name, metadata.get("name"), self.url)
        inputs = stated(metadata, "inputs", self.url)
        outputs = stated(metadata, "outputs", self.url)
        self.input = chosen_input(inputs, self._options.input, self.url)
        self._masks = [tensor for tensor in inputs if tensor.masks and tensor != self.input]
        if self._options.output is not None and outputs:
            named(outputs, self._options.output, self.url)
        self.dim = self._dimension(self._options.dim, self.input.width)
        self._replies = Replies(
            self.url, self._name, self.input.datatype, max(self._http.limits.dim, self.dim),
            self._options.output, self._options.positive,
        )  # fmt: skip
        most = [self._options.batch or _BATCH, most_at_once(metadata, self.input)]
        if metadata.get("platform"):
            most.append(self._configured())
        self._batch = min(size for size in most if size is not None)
        self._http.expect_ready(f"{self.url}/ready")

    def _configured(self) -> int | None:
        """The largest batch that Triton's configuration of the model allows."""
        try:
            configured = self._http.request("GET", f"{self.url}/config").get("max_batch_size")
        except OracleError:  # only Triton has this route
            return None
        return configured if isinstance(configured, int) and configured > 0 else None

    def _dimension(self, dim: int | None, served: int | None) -> int:
        if dim is not None and served is not None and dim != served:
            raise InputError(f"expected dimension {dim}, got {shown(served)} from {self.url}")
        known = dim if dim is not None else served
        if known is None:
            raise InputError(
                f"expected a dimension in the metadata of {self.url}, got none: give "
                "--endpoint dim=NUMBER"
            )
        if dim is None and known > self._http.limits.dim:
            raise OracleError(
                f"expected a dimension of at most {self._http.limits.dim:,} from {self.url}, "
                f"got {shown(known)}: give --endpoint dim or raise Limits(dim=)"
            )
        return known

    @property
    def identity(self) -> str:
        """The address, and which of its tensors are asked and read where people chose them."""
        return self.url + self._options.chosen

    @property
    def precision(self) -> float:
        """The relative error of a number in a question."""
        return torch.finfo(FLOATS[self.input.datatype]).eps / 2

    @property
    def note(self) -> str:
        """What a reader of results should know; nothing where numbers travel exactly."""
        if self.input.datatype == "FP64":
            return ""
        return (
            f"questions travel in {self.input.datatype}, each number within {self.precision:.0e} "
            "of its size: so far at best are weights known"
        )

    def close(self) -> None:
        """Give the connections back; contextlib.closing() does it at the end of a block."""
        self._http.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        length = self.input.length
        if length is not None and sequences.shape[1] != length:
            raise InputError(
                f"expected sequences of {length} tokens, the only length that {self.url} "
                f"states to take, got {sequences.shape[1]}"
            )
        parts = sequences.split(self._rows(sequences))
        answers, failure = self._answered(parts)
        known = [part for part in answers if part is not None]
        for number, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            if answer is not None and answer.shape[1:] != known[0].shape[1:]:
                failure = failure or self._replies.unfit(list(answer.shape), part)
                answers[number] = None
        if failure is None:
            return self._finite(torch.cat(known))
        if isinstance(failure, OracleError) and known:  # what was answered is paid for
            failure.answers = _with_gaps(answers, parts, known[0])
        raise failure

    def _answered(self, parts: Sequence[Tensor]) -> tuple[list[Tensor | None], KeyholeError | None]:
        """What came back of each request, and the first failure, after which no more are sent."""
        if len(parts) == 1:
            return [self._infer(parts[0])], None
        answers: list[Tensor | None] = []
        failure: KeyholeError | None = None
        pool = ThreadPoolExecutor(min(len(parts), self._connections))
        try:
            futures = [pool.submit(self._outcome, part) for part in parts]
            for future in futures:
                outcome = None if future.cancelled() else future.result()
                answers.append(outcome if isinstance(outcome, Tensor) else None)
                if isinstance(outcome, KeyholeError):
                    failure = failure or outcome
                    pool.shutdown(wait=False, cancel_futures=True)
        except BaseException:  # Ctrl-C: nobody waits for what is under way
            pool.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            pool.shutdown()
        return answers, failure

    def _outcome(self, part: Tensor) -> Tensor | KeyholeError:
        """The answers, or why there are none, without the frames that hold the whole reply."""
        try:
            return self._infer(part)
        except KeyholeError as error:
            error.__context__ = None
            return error.with_traceback(None)

    def _finite(self, answers: Tensor) -> Tensor:
        bad = int((~torch.isfinite(answers)).reshape(len(answers), -1).any(1).sum())
        if bad:
            raise OracleError(
                f"expected finite answers from {self.url}, got NaN or infinity in {bad} of "
                f"{len(answers)}",
                answers,
            )
        return answers

    def _rows(self, sequences: Tensor) -> int:
        """Sequences per request, so that answers twice as wide as the questions are allowed."""
        limits = self._http.limits
        fitting = min(limits.body // _DIGITS, limits.parts, 2 * _NUMBERS) // 2
        _, length, dim = sequences.shape
        return max(1, min(self._batch, fitting // (length * dim)))

    def _infer(self, sequences: Tensor) -> Tensor:
        rounded = sequences.to(FLOATS[self.input.datatype])
        if not bool(torch.isfinite(rounded).all()):
            raise InputError(
                f"expected numbers that {self.input.datatype} can hold for {self.url}, got "
                f"{float(sequences.abs().max()):.1e}"
            )
        ones = torch.ones(sequences.shape[:2], dtype=torch.int64)
        number = uuid.uuid4().hex
        content: dict[str, Any] = {
            "id": number,
            "inputs": [self.input.filled(rounded), *(mask.filled(ones) for mask in self._masks)],
        }
        if self._options.output is not None:
            content["outputs"] = [{"name": self._options.output}]

        def read(data: object) -> Tensor:
            return self._replies.read(data, sequences, number)

        return self._http.ask("POST", f"{self.url}/infer", content, read)


def _with_gaps(answers: Sequence[Tensor | None], parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Answers in the order of their questions up to the last that came, NaN where none did."""
    last = max(number for number, answer in enumerate(answers) if answer is not None)
    return torch.cat([
        torch.full((len(part), *like.shape[1:]), math.nan, dtype=torch.float64)
        if answer is None else answer
        for answer, part in zip(answers[: last + 1], parts, strict=False)
    ])  # fmt: skip
