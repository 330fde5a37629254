"""Oracles, and endpoints of texts, on servers that speak the Open Inference Protocol v2.

`OpenInference` takes the address of a server and the name of a model, and is an oracle
(protocol.py): sequences of vectors in, answers out. `TextEndpoint` takes texts or token
ids instead.

MLServer, Triton, KServe and OpenVINO do. Questions are sent as JSON numbers, which hold
a float64 exactly; if the server states a shorter format, they are rounded to it. A long
batch is split into requests, several of which are under way at a time, on connections
that are kept open.

The server is not trusted. `Limits` bounds what it may cost (60 s and 64 MiB a request,
dimensions up to 16,384), and an answer that does not fit its question is refused with a
one-line error. Each request has an id, which servers repeat in the answer, so an answer
that arrives twice or late is not taken for the answer to another request.
"""

from __future__ import annotations

import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions, names_address, without_password
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.core.float64 import full
from keyhole.oracle.http import Garbled, Http, Limits, as_object, shown
from keyhole.oracle.protocol import OracleError, check_sequences, expect_finite_answers

_BATCH = 512  # sequences per request
_MAX_DIGITS = 25  # bytes of one float64 in JSON
_MAX_NUMBERS = 2**18  # per request, since several requests are under way at a time
# in the names of integer inputs other than token ids
_NOT_TOKENS = ("type", "position", "segment")

T = TypeVar("T")


class ServedModel(ABC):
    """The model `model` of the server at `url`: its inputs, and requests to it."""

    def __init__(
        self,
        url: str,
        model: str,
        options: EndpointOptions,
        retries: int = 8,
        **connection: Any,
    ) -> None:
        address = f"{url.rstrip('/')}/v2/models/{model}"
        self.url = without_password(address)
        self.options = options
        self._name = unquote(model.partition("/")[0])  # a version may follow
        self._http = Http(address, options, retries=retries, **connection)
        try:
            metadata = self._http.request("GET", self.url)
            self._expect_name(metadata.get("name"))
            self.inputs = tensor_specs(metadata, "inputs", self.url)
            self.input = self._choose_input(metadata)
            self._http.expect_ready(f"{self.url}/ready")
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _choose_input(self, metadata: dict[str, Any]) -> TensorSpec:
        """Return the input that questions are sent to."""

    def close(self) -> None:
        self._http.close()

    def _infer(
        self,
        inputs: Sequence[dict[str, Any]],
        read: Callable[[list[dict[str, Any]]], T],
    ) -> T:
        """Return what `read` makes of the outputs: of all, or of the one that the options name."""
        request_id = uuid.uuid4().hex
        content: dict[str, Any] = {"id": request_id, "inputs": list(inputs)}
        name = self.options.output
        if name is not None:
            content["outputs"] = [{"name": name}]

        def read_reply(data: object) -> T:
            reply = as_object(data, self.url)
            if reply.get("id") not in (None, "", request_id):
                raise Garbled(f"{self.url} sent the answer to another request")
            self._expect_name(reply.get("model_name"))
            outputs = _as_objects(reply.get("outputs")) or []
            outputs = [item for item in outputs if name in (None, item.get("name"))]
            if not outputs:
                raise self._no_outputs(reply)
            return read(outputs)

        return self._http.ask("POST", f"{self.url}/infer", content, read_reply)

    def _no_outputs(self, reply: dict[str, Any]) -> OracleError:
        return OracleError(
            f"expected outputs with shape and data from {self.url}, got {_describe(reply)}"
        )

    def _expect_name(self, name: object) -> None:
        if name is not None and name != self._name:
            raise OracleError(
                f"{self.url} answers for model {_describe(name)}, not {self._name}"
            )


class OpenInference(ServedModel):
    """The model `model` at `url`; what `options` leaves open is read from the server.

    `dim`, `batch` and `timeout` are shortcuts for the options of these names. `headers`
    are values, not names of environment variables. `limits` bounds what the server may
    cost; a `dim` that is given may exceed `limits.dim`. `connections` is the number of
    requests under way at a time.
    """

    may_change = True  # the server may load another model under the same address

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
        self._connections = connections
        super().__init__(url, model, options, retries, limits=limits, headers=headers)

    def _choose_input(self, metadata: dict[str, Any]) -> TensorSpec:
        """Return the input that takes vectors, and read the dimension and the batch size."""
        self._limits = self._http.limits
        options = self.options
        outputs = tensor_specs(metadata, "outputs", self.url)
        chosen = _vector_input(self.inputs, options.input, self.url)
        if options.output is not None and outputs:
            find_tensor(outputs, options.output, self.url)
        self.dim = self._dimension(options.dim, chosen.width)
        sizes = [options.batch or _BATCH, _max_batch_size(metadata, chosen)]
        if metadata.get("platform"):
            sizes.append(self._configured_batch_size())
        self._batch = min(size for size in sizes if size is not None)
        return chosen

    def _configured_batch_size(self) -> int | None:
        """Return the largest batch that Triton's configuration of the model allows."""
        try:
            configuration = self._http.request("GET", f"{self.url}/config")
        except OracleError:  # only Triton has this route
            return None
        return _least([configuration.get("max_batch_size")])

    def _dimension(self, given: int | None, stated: int | None) -> int:
        if given is not None and stated is not None and given != stated:
            raise InputError(f"{self.url} has dimension {shown(stated)}, not {given}")
        if given is not None:
            return given
        if stated is None:
            raise InputError(
                f"the metadata of {self.url} has no dimension: give --endpoint dim=NUMBER"
            )
        if stated > self._limits.dim:
            raise OracleError(
                f"{self.url} has dimension {shown(stated)}, above the limit of "
                f"{self._limits.dim:,}: give --endpoint dim or raise Limits(dim=)"
            )
        return stated

    @property
    def identity(self) -> str:
        """The address, and the names of the tensors that the options choose."""
        return self.url + self.options.chosen

    @property
    def precision(self) -> float:
        """The relative rounding error of a number in a question."""
        return torch.finfo(FLOATS[self.input.datatype]).eps / 2

    @property
    def note(self) -> str:
        """A remark for readers of results; empty if numbers are sent exactly."""
        if self.input.datatype == "FP64":
            return ""
        return (
            f"questions travel in {self.input.datatype}, each number within {self.precision:.0e} "
            "of its size: weights cannot be known more exactly"
        )

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        length = self.input.length
        if length is not None and sequences.shape[1] != length:
            raise InputError(
                f"{self.url} takes sequences of {length} tokens only, not of {sequences.shape[1]}"
            )
        parts = sequences.split(self._sequences_per_request(sequences))
        answers, failure = self._ask_all(parts)
        known = [part for part in answers if part is not None]
        for number, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            if answer is not None and answer.shape[1:] != known[0].shape[1:]:
                failure = failure or self._wrong_shape(list(answer.shape), part)
                answers[number] = None
        if failure is None:
            return expect_finite_answers(torch.cat(known), f" from {self.url}")
        if isinstance(failure, OracleError) and known:  # these answers are paid for
            failure.answers = _with_gaps(answers, parts, known[0])
        raise failure

    def _ask_all(
        self, parts: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], BaseException | None]:
        """Return the answers to each part and the first failure, which stops further requests."""
        if len(parts) == 1:
            return [self._answers(parts[0])], None
        pool = ThreadPoolExecutor(min(len(parts), self._connections))
        futures = [pool.submit(self._answers_in_thread, part) for part in parts]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: end the requests that are under way
            self.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        failures = [
            None if future.cancelled() else future.exception() for future in futures
        ]
        answers = [
            None if future.cancelled() or failure else future.result()
            for future, failure in zip(futures, failures, strict=True)
        ]
        return answers, next(filter(None, failures), None)

    def _answers_in_thread(self, part: Tensor) -> Tensor:
        try:
            return self._answers(part)
        except KeyholeError as error:
            # The frames hold whole replies, and other threads have replies of their
            # own.
            error.__context__ = None
            raise error.with_traceback(None) from None

    def _sequences_per_request(self, sequences: Tensor) -> int:
        """Return how many sequences fit if their answers may be twice as wide as they are."""
        limits = self._limits
        numbers = min(limits.body // _MAX_DIGITS // 2, limits.parts // 2, _MAX_NUMBERS)
        _, length, dim = sequences.shape
        return max(1, min(self._batch, numbers // (length * dim)))

    def _answers(self, sequences: Tensor) -> Tensor:
        rounded = sequences.to(FLOATS[self.input.datatype])
        if not torch.isfinite(rounded).all():
            raise InputError(
                f"{self.url} takes {self.input.datatype}, which cannot hold "
                f"{float(sequences.abs().max()):.1e}"
            )
        ones = torch.ones(sequences.shape[:2], dtype=torch.int64)
        inputs = [self.input.as_input(rounded)]
        for tensor in self.inputs:
            if tensor.is_mask and tensor != self.input:
                inputs.append(tensor.as_input(ones))
        return self._infer(inputs, lambda outputs: self._read(outputs, sequences))

    def _read(self, outputs: Sequence[dict[str, Any]], sequences: Tensor) -> Tensor:
        """Return the answers in the first output of floats, or else in the first output."""
        floats = [item for item in outputs if str(item.get("datatype")) in FLOATS]
        output = (floats or outputs)[0]
        if "shape" not in output or "data" not in output:
            raise self._no_outputs(output)
        shape = self._shape(output["shape"], sequences)
        values = self._values(output, shape)
        # Servers give one score per sequence as a column, so a vector of one number is
        # a score.
        return values.reshape(shape[:1] if shape[1:] == [1] else shape)

    def _values(self, output: dict[str, Any], shape: list[int]) -> Tensor:
        datatype = str(output.get("datatype"))
        if datatype in TEXTS and shape[1:] in ([], [1]):
            labels = _as_strings(output["data"], math.prod(shape))
            if labels is not None:
                return _signs(labels, self.options.positive, self.url)
        values = _as_numbers(output["data"], shape, self.url)
        # Numbers of a shorter format are rounded to it, since JSON shows fewer of their
        # digits. Answers are also no more exact than the questions.
        formats = [
            FLOATS[name] for name in (self.input.datatype, datatype) if name in FLOATS
        ]
        coarsest = max(formats, key=lambda dtype: torch.finfo(dtype).eps)
        if coarsest is torch.float64:
            return values
        return values.to(coarsest).to(torch.float64)

    def _shape(self, shape: object, sequences: Tensor) -> list[int]:
        """Return the shape of the answers if an oracle may answer in it (see protocol.py)."""
        sizes = _as_sizes(shape)
        count, length, _ = sequences.shape
        if (
            sizes is None
            or len(sizes) not in (1, 2, 3)
            or sizes[0] != count
            or (len(sizes) == 3 and sizes[1] != length)
            or min(sizes[1:], default=1) < 1
        ):
            raise self._wrong_shape(shape, sequences)
        limit = max(self._limits.dim, self.dim)
        if len(sizes) > 1 and sizes[-1] > limit:
            raise OracleError(
                f"answers from {self.url} are {shown(sizes[-1])} numbers wide, above the limit of "
                f"{limit:,}: raise Limits(dim=)"
            )
        return sizes

    def _wrong_shape(self, shape: object, sequences: Tensor) -> OracleError:
        count, length, _ = sequences.shape
        return OracleError(
            f"expected answers of one shape, ({count}), ({count}, m) or ({count}, {length}, m), "
            f"from {self.url}, got {_describe(shape)}"
        )


def _with_gaps(
    answers: Sequence[Tensor | None],
    parts: Sequence[Tensor],
    like: Tensor,
) -> Tensor:
    """Join the answers up to the last that arrived, with NaN for those that did not."""
    last = max(number for number, answer in enumerate(answers) if answer is not None)
    joined: list[Tensor] = []
    for answer, part in zip(answers[: last + 1], parts, strict=False):
        if answer is None:
            answer = full(math.nan, len(part), *like.shape[1:])
        joined.append(answer)
    return torch.cat(joined)


# The tensors that a server's metadata states, and the choice of those that are sent and
# read.

FLOATS = {
    "FP64": torch.float64,
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}
TEXTS = ("BYTES",)
IDS = ("INT64", "INT32", "UINT64", "UINT32")
_MAX_NAME = 1000
_NEGATIVE = frozenset({"0", "-1", "no", "n", "false", "negative", "neg", "label_0"})
_POSITIVE = frozenset({"1", "+1", "yes", "y", "true", "positive", "pos", "label_1"})


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the server describes it; a size of −1 is free."""

    name: str = "sequences"
    datatype: str = "FP64"
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int | None:
        return _least(self.shape[-1:])

    @property
    def length(self) -> int | None:
        """The only sequence length that it takes; None if it takes any."""
        return _least(self.shape[1:-1]) if len(self.shape) == 3 else None

    @property
    def is_mask(self) -> bool:
        """Is it an attention mask?"""
        return "mask" in self.name.lower() and len(self.shape) == 2

    @property
    def takes_text(self) -> bool:
        """Does it take texts or token ids?"""
        return self.datatype in (*TEXTS, *IDS) and not self.is_mask

    def as_input(self, values: Tensor) -> dict[str, Any]:
        """Return the tensor with these values, as a request sends it."""
        return {
            "name": self.name,
            "shape": list(values.shape),
            "datatype": self.datatype,
            "data": values.reshape(-1).tolist(),
        }


class TakesTexts(InputError):
    """The endpoint takes texts or token ids, but vectors are needed."""

    def __init__(self, tensor: TensorSpec, url: str) -> None:
        self.what = "texts" if tensor.datatype in TEXTS else "token ids"
        super().__init__(
            f"{url} does not take vectors in {', '.join(FLOATS)}: its input {tensor.name!r} takes "
            f"{self.what} ({tensor.datatype}). keyhole audit shows what its answers expose"
        )


def tensor_specs(
    metadata: dict[str, Any],
    kind: str,
    url: str,
) -> list[TensorSpec]:
    """Return the inputs or outputs of a model; empty if the server does not list them."""
    listed = metadata.get(kind) or []
    items = _as_objects(listed)
    if items is None:
        raise OracleError(
            f"expected a list of {kind} from {url}, got {_describe(listed)}"
        )
    return [_tensor_spec(item, kind.removesuffix("s"), url) for item in items]


def _tensor_spec(
    item: dict[str, Any],
    kind: str,
    url: str,
) -> TensorSpec:
    def wrong(what: str, got: object) -> OracleError:
        return OracleError(
            f"expected the {what} of an {kind} from {url}, got {_describe(got)}"
        )

    name = item.get("name", TensorSpec.name)
    datatype = item.get("datatype", TensorSpec.datatype)
    if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME:
        raise wrong("name", name)
    sizes = _as_sizes(item.get("shape", []))
    if sizes is None:
        raise wrong("shape", item.get("shape"))
    if not isinstance(datatype, str) or not datatype.isalnum() or len(datatype) > 10:
        raise wrong("datatype", datatype)
    return TensorSpec(name, datatype.upper(), tuple(sizes))


def _vector_input(
    inputs: Sequence[TensorSpec],
    name: str | None,
    url: str,
) -> TensorSpec:
    """Return the tensor that takes vectors: the one of that name, or the only one."""
    if not inputs:
        return TensorSpec() if name is None else TensorSpec(name)
    if name is not None:
        inputs = [find_tensor(inputs, name, url)]
    vectors = [
        tensor for tensor in inputs if tensor.datatype in FLOATS and not tensor.is_mask
    ]
    if not vectors:
        for tensor in inputs:
            if tensor.takes_text:
                raise TakesTexts(tensor, url)
        kinds = ", ".join(f"{tensor.name} ({tensor.datatype})" for tensor in inputs[:5])
        raise InputError(
            f"{url} has no input of vectors in {', '.join(FLOATS)}, only {shown(kinds, 200)}"
        )
    sequences = [tensor for tensor in vectors if len(tensor.shape) == 3] or vectors
    if len(sequences) > 1:
        raise InputError(
            f"{url} has several inputs of vectors ({_names(sequences)}): give --endpoint input=NAME"
        )
    return sequences[0]


def find_tensor(
    tensors: Sequence[TensorSpec],
    name: str,
    url: str,
) -> TensorSpec:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise InputError(
        f"{url} has no tensor {shown(name)}: choose among {_names(tensors)}"
    )


def _names(tensors: Sequence[TensorSpec]) -> str:
    return shown(", ".join(tensor.name for tensor in tensors[:5]), 200)


def _max_batch_size(metadata: dict[str, Any], tensor: TensorSpec) -> int | None:
    """Return how many sequences the server states that it takes in one request."""
    parameters = metadata.get("parameters")
    about = parameters if isinstance(parameters, dict) else {}
    limits = [about.get("max_batch_size"), metadata.get("max_batch_size")]
    if len(tensor.shape) == 3:
        limits.append(tensor.shape[0])
    return _least(limits)


def _least(limits: Sequence[object]) -> int | None:
    """Return the least of the limits that are counts; None if there is none."""
    counts = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(counts, default=None)


def _signs(
    labels: Sequence[str],
    positive: str | None,
    url: str,
) -> Tensor:
    """Return 1 for each positive label and 0 for each other."""
    if positive is not None:
        answers = [label == positive for label in labels]
    else:
        words = [label.strip().lower() for label in labels]
        for label, word in zip(labels, words, strict=True):
            if word not in _NEGATIVE | _POSITIVE:
                raise OracleError(
                    f"expected numbers, or labels such as no and yes, from {url}, got "
                    f"{shown(repr(label), 60)}: give --endpoint positive=LABEL, the one that "
                    "counts as 1, or --endpoint output=NAME of one with numbers"
                )
        answers = [word in _POSITIVE for word in words]
    return torch.tensor(answers, dtype=torch.float64)


def _as_objects(items: object) -> list[dict[str, Any]] | None:
    """Return `items` if it is a list of objects."""
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        return items
    return None


def _as_sizes(shape: object) -> list[int] | None:
    """Return `shape` if it is a list of sizes, each −1 or more."""
    if isinstance(shape, list) and all(
        type(size) is int and size >= -1 for size in shape
    ):
        return shape
    return None


def _as_strings(data: object, count: int) -> list[str] | None:
    """Return `data` if it is a list of `count` strings."""
    strings = isinstance(data, list) and all(isinstance(item, str) for item in data)
    if strings and len(cast("list[str]", data)) == count:
        return cast("list[str]", data)
    return None


def _as_numbers(
    data: object,
    shape: Sequence[int],
    url: str,
) -> Tensor:
    """Return the numbers of a list, flat or nested, if there are as many as the shape takes."""
    count = math.prod(shape)
    items = data if isinstance(data, list) else None
    if items is not None and (
        len(items) == count or (items and isinstance(items[0], list))
    ):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            values = torch.tensor(items, dtype=torch.float64).reshape(-1)
            if len(values) == count:
                return values
    raise OracleError(
        f"expected {count:,} numbers for shape {list(shape)} from {url}, got {_describe(data)}"
    )


def _describe(value: object) -> str:
    """Describe a value from a server in a few words, however large or deep it is."""
    if isinstance(value, dict):
        keys = list(value)
        return f"an object with {shown(', '.join(keys[:5])) or 'no keys'}"
    if isinstance(value, list):
        items = value
        short = len(items) <= 5 and all(isinstance(item, int | float) for item in items)
        return shown(items) if short else f"a list of {len(items):,}"
    return shown(repr(value[:80] if isinstance(value, str) else value))


# Endpoints that take texts or token ids. They are no oracles, since an attacker cannot
# send them vectors of their choice: all that an attacker gets is answers to texts.


@dataclass(frozen=True, eq=False)
class Output:
    """One output for one text: numbers, in a shape without the batch, or strings."""

    name: str
    datatype: str
    values: Tensor | None
    labels: tuple[str, ...] = ()


class TextEndpoint(ServedModel):
    """The model `model` at `url`, which takes texts or token ids."""

    def _choose_input(self, metadata: dict[str, Any]) -> TensorSpec:  # noqa: ARG002
        """Return the input that the options name, or the first that takes texts or token ids."""
        if self.options.input is not None:
            return find_tensor(self.inputs, self.options.input, self.url)
        for tensor in self.inputs:
            if tensor.takes_text and not any(
                word in tensor.name.lower() for word in _NOT_TOKENS
            ):
                return tensor
        raise InputError(f"{self.url} has no input of texts or tokens")

    @property
    def takes_texts(self) -> bool:
        return self.input.datatype in TEXTS

    @property
    def length(self) -> int | None:
        """The only number of tokens that it takes; None if it takes any."""
        fixed = not self.takes_texts and len(self.input.shape) == 2
        return self.input.width if fixed else None

    def ask(self, text: str | Sequence[int]) -> list[Output]:
        """Return every output for one text, given as a string or as token ids."""
        inputs = [self._text(text)] if isinstance(text, str) else self._tokens(text)
        return self._infer(
            inputs, lambda outputs: [self._output(item) for item in outputs]
        )

    def _text(self, text: str) -> dict[str, Any]:
        shape = [1] * max(1, len(self.input.shape))
        return {
            "name": self.input.name,
            "shape": shape,
            "datatype": "BYTES",
            "data": [text],
        }

    def _tokens(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the ids with the other inputs: attention masks, positions, token types.

        If the length is fixed, the ids are padded with zeros, which the mask excludes.
        """
        length = self.length or len(ids)
        if len(ids) > length:
            raise InputError(
                f"{self.url} takes at most {length} tokens, not {len(ids)}"
            )
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(length).unsqueeze(0)
        inputs = [self.input.as_input(padded)]
        for tensor in self.inputs:
            if tensor.is_mask:
                inputs.append(tensor.as_input((positions < len(ids)).long()))
            elif tensor != self.input and tensor.datatype in IDS:
                is_position = "position" in tensor.name.lower()
                values = positions if is_position else torch.zeros_like(padded)
                inputs.append(tensor.as_input(values))
        return inputs

    def _output(self, output: dict[str, Any]) -> Output:
        name = str(output.get("name", ""))
        datatype = str(output.get("datatype", ""))
        sizes = _as_sizes(output.get("shape"))
        if not sizes or min(sizes) < 0 or sizes[0] != 1:
            raise OracleError(
                f"expected one answer for one text from {self.url}, got the shape "
                f"{_describe(output.get('shape'))}"
            )
        labels = _as_strings(output.get("data"), math.prod(sizes))
        if datatype in TEXTS and labels is not None:
            return Output(name, datatype, None, tuple(labels))
        values = _as_numbers(output.get("data"), sizes, self.url)
        # A column of one number is a number.
        shape = [] if sizes[1:] == [1] else sizes[1:]
        return Output(name, datatype, values.reshape(shape))
