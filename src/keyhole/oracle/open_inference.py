"""Oracles, and endpoints of texts, behind a server that speaks the Open Inference Protocol v2.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions, names_address, without_password
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.oracle.connection import connected
from keyhole.oracle.http import Garbled, Limits, as_object, shown
from keyhole.oracle.protocol import OracleError, check_sequences

_DIGITS = 25  # bytes that a float64 takes in JSON, at most
_NUMBERS = 2**18  # in one question: several are under way at a time
_BATCH = 512
_NOT_TOKENS = ("type", "position", "segment")  # in the names of integer inputs other than token ids

T = TypeVar("T")


class ServedModel:
    """The model `model` of the server at `url`: its metadata, and requests to it."""

    def __init__(self, url: str, model: str, options: EndpointOptions, **connection: Any) -> None:
        address = f"{url.rstrip('/')}/v2/models/{model}"
        self.url = without_password(address)
        self.http = connected(options, address, **connection)
        self._name = unquote(model.partition("/")[0])  # what follows may be a version
        self._output = options.output

    def metadata(self) -> dict[str, Any]:
        metadata = self.http.request("GET", self.url)
        self._expect_name(metadata.get("name"))
        return metadata

    def infer(
        self, inputs: Sequence[dict[str, Any]], read: Callable[[list[dict[str, Any]]], T]
    ) -> T:
        """What `read` makes of the outputs for these inputs: the one that was chosen, or all."""
        number = uuid.uuid4().hex
        content: dict[str, Any] = {"id": number, "inputs": list(inputs)}
        if self._output is not None:
            content["outputs"] = [{"name": self._output}]

        def read_reply(data: object) -> T:
            reply = as_object(data, self.url)
            if reply.get("id") not in (None, "", number):
                raise Garbled(f"{self.url} sent the answer to another request")
            self._expect_name(reply.get("model_name"))
            outputs = as_objects(reply.get("outputs")) or []
            if self._output is not None:
                outputs = [item for item in outputs if item.get("name") == self._output]
            if not outputs:
                raise OracleError(
                    f"expected outputs with shape and data from {self.url}, got {describe(reply)}"
                )
            return read(outputs)

        return self.http.ask("POST", f"{self.url}/infer", content, read_reply)

    def _expect_name(self, name: object) -> None:
        if name is not None and name != self._name:
            raise OracleError(f"{self.url} answers for model {describe(name)}, not {self._name}")


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
        self._options, self._connections = options, connections
        self._model = ServedModel(
            url, model, options, limits=limits, retries=retries, headers=headers
        )
        self._limits, self.url = self._model.http.limits, self._model.url
        try:
            self._inspect()
        except BaseException:
            self.close()
            raise

    def _inspect(self) -> None:
        """Read the model's metadata, once the server is ready."""
        metadata = self._model.metadata()
        inputs = tensor_specs(metadata, "inputs", self.url)
        outputs = tensor_specs(metadata, "outputs", self.url)
        self.input = chosen_input(inputs, self._options.input, self.url)
        self._masks = [tensor for tensor in inputs if tensor.is_mask and tensor != self.input]
        if self._options.output is not None and outputs:
            find_tensor(outputs, self._options.output, self.url)
        self.dim = self._dimension(self._options.dim, self.input.width)
        most = [self._options.batch or _BATCH, max_batch_size(metadata, self.input)]
        if metadata.get("platform"):
            most.append(self._configured())
        self._batch = min(size for size in most if size is not None)
        self._model.http.expect_ready(f"{self.url}/ready")

    def _configured(self) -> int | None:
        """The largest batch that Triton's configuration of the model allows."""
        try:
            configured = self._model.http.request("GET", f"{self.url}/config").get("max_batch_size")
        except OracleError:  # only Triton has this route
            return None
        return configured if isinstance(configured, int) and configured > 0 else None

    def _dimension(self, dim: int | None, served: int | None) -> int:
        if dim is not None and served is not None and dim != served:
            raise InputError(f"{self.url} has dimension {shown(served)}, not {dim}")
        known = dim if dim is not None else served
        if known is None:
            raise InputError(
                f"the metadata of {self.url} has no dimension: give --endpoint dim=NUMBER"
            )
        if dim is None and known > self._limits.dim:
            raise OracleError(
                f"{self.url} has dimension {shown(known)}, above the limit of "
                f"{self._limits.dim:,}: give --endpoint dim or raise Limits(dim=)"
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
            "of its size: weights cannot be known more exactly"
        )

    def close(self) -> None:
        """Give the connections back; contextlib.closing() does it at the end of a block."""
        self._model.http.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        length = self.input.length
        if length is not None and sequences.shape[1] != length:
            raise InputError(
                f"{self.url} takes sequences of {length} tokens only, not of {sequences.shape[1]}"
            )
        parts = sequences.split(self._rows(sequences))
        answers, failure = self._answered(parts)
        known = [part for part in answers if part is not None]
        for number, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            if answer is not None and answer.shape[1:] != known[0].shape[1:]:
                failure = failure or self._unfit(list(answer.shape), part)
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
                f"NaN or infinity in {bad} of {len(answers)} answers from {self.url}", answers
            )
        return answers

    def _rows(self, sequences: Tensor) -> int:
        """Sequences per request, so that answers twice as wide as the questions are allowed."""
        limits = self._limits
        fitting = min(limits.body // _DIGITS, limits.parts, 2 * _NUMBERS) // 2
        _, length, dim = sequences.shape
        return max(1, min(self._batch, fitting // (length * dim)))

    def _infer(self, sequences: Tensor) -> Tensor:
        rounded = sequences.to(FLOATS[self.input.datatype])
        if not bool(torch.isfinite(rounded).all()):
            raise InputError(
                f"{self.url} takes {self.input.datatype}, which cannot hold "
                f"{float(sequences.abs().max()):.1e}"
            )
        ones = torch.ones(sequences.shape[:2], dtype=torch.int64)
        inputs = [self.input.as_input(rounded), *(mask.as_input(ones) for mask in self._masks)]
        return self._model.infer(inputs, lambda outputs: self._read(outputs, sequences))

    def _read(self, outputs: Sequence[dict[str, Any]], sequences: Tensor) -> Tensor:
        """The answers to `sequences`: the first output of numbers, or else the first."""
        of_numbers = [item for item in outputs if item.get("datatype") in FLOATS]
        output = (of_numbers or outputs)[0]
        if "shape" not in output or "data" not in output:
            raise OracleError(
                f"expected outputs with shape and data from {self.url}, got {describe(output)}"
            )
        shape = self._shape(output["shape"], sequences)
        values = self._values(output, shape)
        # Servers give a score per sequence as a column; a vector of one number is a score.
        return values.reshape(shape[:1] if shape[1:] == [1] else shape)

    def _values(self, output: dict[str, Any], shape: list[int]) -> Tensor:
        count, data, datatype = math.prod(shape), output["data"], output.get("datatype")
        labels = as_strings(data, count) if datatype in TEXTS and shape[1:] in ([], [1]) else None
        if labels is not None:
            return torch.tensor(
                signs(labels, self._options.positive, self.url), dtype=torch.float64
            )
        values = as_numbers(data, count)
        if values is None:
            raise OracleError(
                f"expected {count:,} numbers for shape {shape} from {self.url}, "
                f"got {describe(data)}"
            )
        # Numbers of a shorter format as they are there: printed, they have fewer digits. And
        # answers are no more exact than the questions they belong to.
        formats = [FLOATS[name] for name in (self.input.datatype, datatype) if name in FLOATS]
        coarsest = max(formats, key=lambda dtype: torch.finfo(dtype).eps)
        return values if coarsest is torch.float64 else values.to(coarsest).to(torch.float64)

    def _shape(self, shape: object, sequences: Tensor) -> list[int]:
        """The shape of the answers, if an oracle may answer so; see protocol.py."""
        sizes = as_sizes(shape)
        count, length, _ = sequences.shape
        if (
            sizes is None
            or len(sizes) not in (1, 2, 3)
            or sizes[0] != count
            or (len(sizes) == 3 and sizes[1] != length)
            or min(sizes[1:], default=1) < 1
        ):
            raise self._unfit(shape, sequences)
        widest = max(self._limits.dim, self.dim)
        if len(sizes) > 1 and sizes[-1] > widest:
            raise OracleError(
                f"answers from {self.url} are {shown(sizes[-1])} numbers wide, above the limit of "
                f"{widest:,}: raise Limits(dim=)"
            )
        return sizes

    def _unfit(self, shape: object, sequences: Tensor) -> OracleError:
        count, length, _ = sequences.shape
        return OracleError(
            f"expected answers of one shape, ({count}), ({count}, m) or ({count}, {length}, m), "
            f"from {self.url}, got {describe(shape)}"
        )


def _with_gaps(answers: Sequence[Tensor | None], parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Answers in the order of their questions up to the last that came, NaN where none did."""
    last = max(number for number, answer in enumerate(answers) if answer is not None)
    return torch.cat([
        torch.full((len(part), *like.shape[1:]), math.nan, dtype=torch.float64)
        if answer is None else answer
        for answer, part in zip(answers[: last + 1], parts, strict=False)
    ])  # fmt: skip


# What a server's metadata says of the model's tensors, and which of them are sent and read.
#
# Metadata is checked before it is used, and refused where it makes no sense.

FLOATS = {
    "FP64": torch.float64, "FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
TEXTS, IDS = ("BYTES",), ("INT64", "INT32", "UINT64", "UINT32")
_LONGEST_NAME = 1000
_NEGATIVE = frozenset({"0", "-1", "no", "n", "false", "negative", "neg", "label_0"})
_POSITIVE = frozenset({"1", "+1", "yes", "y", "true", "positive", "pos", "label_1"})


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the server describes it; sizes of −1 are free."""

    name: str = "sequences"
    datatype: str = "FP64"
    shape: tuple[int, ...] = ()

    @property
    def width(self) -> int | None:
        return self.shape[-1] if self.shape and self.shape[-1] > 0 else None

    @property
    def length(self) -> int | None:
        """The only sequence length that it takes; None where any will do."""
        return self.shape[1] if len(self.shape) == 3 and self.shape[1] > 0 else None

    @property
    def is_mask(self) -> bool:
        """Is it an attention mask?"""
        return "mask" in self.name.lower() and len(self.shape) == 2

    def as_input(self, values: Tensor) -> dict[str, Any]:
        """The tensor with these values, as a request sends it."""
        return {
            "name": self.name,
            "shape": list(values.shape),
            "datatype": self.datatype,
            "data": values.reshape(-1).tolist(),
        }


class TakesTexts(InputError):
    """An endpoint that takes texts or token ids, where vectors are needed."""

    def __init__(self, tensor: TensorSpec, url: str) -> None:
        self.what = "texts" if tensor.datatype in TEXTS else "token ids"
        super().__init__(
            f"{url} does not take vectors in {', '.join(FLOATS)}: its input {tensor.name!r} takes "
            f"{self.what} ({tensor.datatype}). keyhole audit shows what its answers expose"
        )


def tensor_specs(metadata: dict[str, Any], kind: str, url: str) -> list[TensorSpec]:
    """The inputs or outputs of a model; empty where the server does not list them."""
    listed = metadata.get(kind) or []
    items = as_objects(listed)
    if items is None:
        raise OracleError(f"expected a list of {kind} from {url}, got {describe(listed)}")
    return [_tensor_spec(item, kind.removesuffix("s"), url) for item in items]


def _tensor_spec(item: dict[str, Any], kind: str, url: str) -> TensorSpec:
    name, shape = item.get("name", TensorSpec.name), item.get("shape", [])
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise OracleError(f"expected the name of an {kind} from {url}, got {describe(name)}")
    sizes = as_sizes(shape)
    if sizes is None:
        raise OracleError(f"expected the shape of an {kind} from {url}, got {describe(shape)}")
    datatype = item.get("datatype", TensorSpec.datatype)
    known = isinstance(datatype, str) and len(datatype) <= 10 and datatype.isalnum()
    if not known:
        raise OracleError(
            f"expected the datatype of an {kind} from {url}, got {describe(datatype)}"
        )
    return TensorSpec(name, datatype.upper(), tuple(sizes))


def chosen_input(inputs: Sequence[TensorSpec], name: str | None, url: str) -> TensorSpec:
    """The tensor that takes vectors: the one of that name, or the only one there is."""
    if name is not None and inputs:
        inputs = [find_tensor(inputs, name, url)]
    if not inputs:
        return TensorSpec() if name is None else TensorSpec(name)
    vectors = [tensor for tensor in inputs if tensor.datatype in FLOATS and not tensor.is_mask]
    if not vectors:
        for tensor in inputs:
            if tensor.datatype in (*TEXTS, *IDS) and not tensor.is_mask:
                raise TakesTexts(tensor, url)
        kinds = ", ".join(f"{tensor.name} ({tensor.datatype})" for tensor in inputs[:5])
        raise InputError(
            f"{url} has no input of vectors in {', '.join(FLOATS)}, only {shown(kinds, 200)}"
        )
    several = [tensor for tensor in vectors if len(tensor.shape) == 3] or vectors
    if len(several) > 1:
        names = ", ".join(tensor.name for tensor in several[:5])
        raise InputError(
            f"{url} has several inputs of vectors ({shown(names, 200)}): give --endpoint input=NAME"
        )
    return several[0]


def find_tensor(tensors: Sequence[TensorSpec], name: str, url: str) -> TensorSpec:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    names = ", ".join(tensor.name for tensor in tensors[:5])
    raise InputError(f"{url} has no tensor {shown(name)}: choose among {shown(names, 200)}")


def max_batch_size(metadata: dict[str, Any], tensor: TensorSpec) -> int | None:
    """How many sequences the server says it takes in one request."""
    parameters = metadata.get("parameters")
    about = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
    limits = [about.get("max_batch_size"), metadata.get("max_batch_size")]
    if len(tensor.shape) == 3:
        limits.append(tensor.shape[0])
    whole = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(whole, default=None)


def signs(labels: Sequence[object], positive: str | None, url: str) -> list[float]:
    """Words as signs: 1 where a label is the positive one, else 0."""
    if positive is not None:
        return [float(label == positive) for label in labels]
    answers: list[float] = []
    for label in labels:
        word = str(label).strip().lower()
        if word not in _NEGATIVE | _POSITIVE:
            raise OracleError(
                f"expected numbers, or labels such as no and yes, from {url}, got "
                f"{shown(repr(label), 60)}: give --endpoint positive=LABEL, the one that "
                "counts as 1, or --endpoint output=NAME of one with numbers"
            )
        answers.append(float(word in _POSITIVE))
    return answers


def as_objects(items: object) -> list[dict[str, Any]] | None:
    """A list of objects; None where it is anything else."""
    if not isinstance(items, list):
        return None
    listed = cast("list[object]", items)
    inside = [cast("dict[str, Any]", item) for item in listed if isinstance(item, dict)]
    return inside if len(inside) == len(listed) else None


def as_sizes(shape: object) -> list[int] | None:
    if not isinstance(shape, list):
        return None
    sizes = cast("list[object]", shape)
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    return whole if len(whole) == len(sizes) and min(whole, default=0) >= -1 else None


def as_numbers(data: object, count: int) -> Tensor | None:
    """The numbers of a list, flat or nested, if there are `count`."""
    if not isinstance(data, list):
        return None
    items = cast("list[object]", data)
    if len(items) != count and not (items and isinstance(items[0], list)):
        return None
    try:
        values = torch.tensor(items, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return values.reshape(-1) if values.numel() == count else None


def as_strings(data: object, count: int) -> list[str] | None:
    """The strings of a list, if there are `count` and all are strings."""
    items = cast("list[object]", data) if isinstance(data, list) else []
    strings = [item for item in items if isinstance(item, str)]
    return strings if len(strings) == len(items) == count else None


def describe(value: object) -> str:
    """A value from a server's answer in a few words, however large or deep it is."""
    if isinstance(value, dict):
        keys = list(cast("dict[str, Any]", value))
        return f"an object with {shown(', '.join(keys[:5])) or 'no keys'}"
    if isinstance(value, list):
        items = cast("list[object]", value)
        short = len(items) <= 5 and all(isinstance(item, int | float) for item in items)
        return shown(items) if short else f"a list of {len(items):,}"
    return shown(repr(value[:80] if isinstance(value, str) else value))


# Endpoints that take texts or token ids. An attacker cannot send vectors of their choice to one, so
# it is no oracle: all they get is its answers to texts.


@dataclass(frozen=True, eq=False)
class Output:
    """One output for one text: numbers, in a shape without the batch, or strings."""

    name: str
    datatype: str
    values: Tensor | None
    labels: tuple[str, ...] = ()


class TextEndpoint:
    """The model `model` at `url`, which takes texts or token ids."""

    def __init__(self, url: str, model: str, options: EndpointOptions | None = None) -> None:
        self._options = options or EndpointOptions()
        self._model = ServedModel(url, model, self._options)
        self.identity = self._model.url
        try:
            self.inputs = tensor_specs(self._model.metadata(), "inputs", self.identity)
            self.input = self._choose_input()
            self._model.http.expect_ready(f"{self.identity}/ready")
        except BaseException:
            self.close()
            raise

    def _choose_input(self) -> TensorSpec:
        """The input that the options name, or the first that takes texts or token ids."""
        if self._options.input is not None:
            return find_tensor(self.inputs, self._options.input, self.identity)
        for tensor in self.inputs:
            other = tensor.is_mask or any(word in tensor.name.lower() for word in _NOT_TOKENS)
            if tensor.datatype in (*TEXTS, *IDS) and not other:
                return tensor
        raise InputError(f"{self.identity} has no input of texts or tokens")

    @property
    def takes_texts(self) -> bool:
        return self.input.datatype in TEXTS

    @property
    def length(self) -> int | None:
        """The only number of tokens that it takes; None where any number will do."""
        sizes = self.input.shape
        return sizes[-1] if not self.takes_texts and len(sizes) == 2 and sizes[-1] > 0 else None

    def close(self) -> None:
        self._model.http.close()

    def ask(self, text: str | Sequence[int]) -> list[Output]:
        """Every output for one text, given as a string or as token ids."""
        inputs = [self._text(text)] if isinstance(text, str) else self._tokens(text)
        return self._model.infer(inputs, lambda outputs: [self._output(item) for item in outputs])

    def _text(self, text: str) -> dict[str, Any]:
        shape = [1] * max(1, len(self.input.shape))
        return {"name": self.input.name, "shape": shape, "datatype": "BYTES", "data": [text]}

    def _tokens(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The ids and the inputs that go with them: attention masks, positions, token types.

        Where the length is fixed, the ids are padded with zeros that the mask leaves out.
        """
        length = self.length or len(ids)
        if len(ids) > length:
            raise InputError(f"{self.identity} takes at most {length} tokens, not {len(ids)}")
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(length).unsqueeze(0)
        mask = (positions < len(ids)).long()
        inputs = [self.input.as_input(padded)]
        for tensor in self.inputs:
            if tensor.is_mask:
                inputs.append(tensor.as_input(mask))
            elif tensor != self.input and tensor.datatype in IDS:
                is_position = "position" in tensor.name.lower()
                values = positions if is_position else torch.zeros_like(padded)
                inputs.append(tensor.as_input(values))
        return inputs

    def _output(self, output: dict[str, Any]) -> Output:
        name, datatype = str(output.get("name", "")), str(output.get("datatype", ""))
        sizes = as_sizes(output.get("shape"))
        if sizes is None or min(sizes, default=1) < 0 or not sizes or sizes[0] != 1:
            raise OracleError(
                f"expected one answer for one text from {self.identity}, got the shape "
                f"{describe(output.get('shape'))}"
            )
        count = math.prod(sizes)
        labels = as_strings(output.get("data"), count)
        if datatype in TEXTS and labels is not None:
            return Output(name, datatype, None, tuple(labels))
        values = as_numbers(output.get("data"), count)
        if values is None:
            raise OracleError(
                f"expected {count:,} numbers for shape {sizes} from {self.identity}, got "
                f"{describe(output.get('data'))}"
            )
        # A column of one number is a number.
        return Output(name, datatype, values.reshape([] if sizes[1:] == [1] else sizes[1:]))
