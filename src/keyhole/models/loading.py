"""Models from folders, from the hub and from GGUF files: safetensors only, never remote code.

On a GPU a language model's weights keep the checkpoint's own precision: a service
computes in it, and there may not be memory for twice as much. Other models, and all
models on a CPU, are float32: encoders are small, classifiers may be trained, and half
precision is slow on a CPU.

transformers chooses how attention is computed, mostly without ever holding a whole
attention map, so that memory does not grow with the square of a text's length.
`capture` asks for maps where they are needed.

A pickled checkpoint can run any code when it is opened, so it is refused without
`allow_pickle=True`. Code that a checkpoint brings along is never run.

`identity` names a model by what it computes: its configuration and its weights (every
name and shape, and a sample of the values), without the head. So a leak can name its
model.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import math
import re
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_among, first_line, optional
from keyhole.core.files import exists, expect_file, is_folder, unwritable
from keyhole.core.machine import available, expect_device, expect_memory
from keyhole.models.hooks import evaluating

T = TypeVar("T")
# attribute of a linear map: the type of its weights in a GGUF file
STORED = "stored_as"
_log = logging.getLogger(__name__)
_LARGE = 2**30  # bytes of weights from which the memory is logged
_MAX_HEADER = 2**27  # bytes of the header of a file of weights
_FITS = "choose a smaller model, or a GPU with more memory (--device cuda)"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/[\w.-]{1,96})?")
_SAMPLES = 32  # values of each tensor that enter the identity
_NO_EFFECT = frozenset(
    {  # settings that do not change hidden states
        "_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "problem_type",
        "_attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "gradient_checkpointing",
        "quantization_config",
        "chunk_size_feed_forward",
        "tie_word_embeddings",
    }
)


# Tasks: what a model's head is for

Task = Literal["base", "classification", "choice", "causal", "seq2seq"]
# These need no labels: what they generate is the right answer.
GENERATES = ("causal", "seq2seq")
AUTO_CLASSES: dict[str, str] = {  # of transformers, with what their heads give
    "base": "AutoModel",  # hidden states
    "causal": "AutoModelForCausalLM",  # the next token
    # a class of a text, or an image
    "classification": "AutoModelForSequenceClassification",
    "choice": "AutoModelForMultipleChoice",  # one of several texts
    "seq2seq": "AutoModelForSeq2SeqLM",  # the next token of a decoder, given a text
}
_ENDINGS: dict[str, Task] = {  # of the names of classes with a head
    # a class for each token does not classify the text
    "ForTokenClassification": "base",
    "Classification": "classification",
    "Classifier": "classification",
    "ForMultipleChoice": "choice",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "seq2seq",
    "MTModel": "seq2seq",
}


def named_task(architecture: str) -> Task:
    """Return the task that an architecture's name ends in; "base" if it is no other one."""
    for ending, task in _ENDINGS.items():
        if architecture.endswith(ending):
            return task
    return "base"


def head_of(model: Any) -> Task:
    """Return the task of a model's head; "base" if it has no head for another one."""
    task = named_task(type(model).__name__)
    if task == "seq2seq" and not getattr(model.config, "is_encoder_decoder", False):
        return "base"  # it writes about images, or sounds
    return task


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be attacked: in eval mode, without gradients for its weights."""

    model: Any
    tokenizer: Any
    identity: str
    name: str


def transformers() -> Any:
    """Return the transformers library; raise MissingExtra if it is not installed."""
    return optional("transformers", "transformers is not installed", "models")


# A cluster's worker may have several threads, but memory for one model.
_lock = threading.RLock()
# key, value and what closes it: one entry or none
_kept: list[tuple[Any, Any, ExitStack]] = []


@contextmanager
def kept_open(key: object, make: Callable[[ExitStack], T]) -> Generator[T]:
    """Open what `make` opens, and keep it for the next call with an equal key.

    So a worker opens a model once. The process has this one cache. It holds one value,
    which is closed before the next is opened.
    """
    with _lock:
        if not _kept or _kept[0][0] != key:
            close_kept()
            with ExitStack() as resources:
                _kept.append((key, make(resources), resources.pop_all()))
        yield _kept[0][1]


def close_kept() -> None:
    """Close what `kept_open` holds."""
    with _lock:
        while _kept:
            _kept.pop()[2].close()


# Loading


def load_model(
    name: str | Path,
    *,
    task: str = "base",
    allow_pickle: bool = False,
    tokenizer: bool = True,
    device: str | torch.device = "cpu",
    new_head: int | None = None,
) -> Loaded:
    """Load a model and its tokenizer from a folder, `folder/file.gguf`, or a name on the hub.

    `task` adds a head: "base" (none), "causal", "classification", "choice" or
    "seq2seq". A head that the checkpoint does not hold would be random, so it is
    refused; `new_head` asks for a new head with that many classes, to be trained.
    """
    expect_among("the task", task, AUTO_CLASSES)
    where, options = _source(str(name), allow_pickle)
    library = transformers()
    gguf = options.get("gguf_file")
    expect_device(device)
    on_cpu = torch.device(device).type == "cpu"
    dtype = torch.float32 if on_cpu else _own_dtype(name)
    settings: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if gguf is None:
        settings["use_safetensors"] = None if allow_pickle else True
    if not on_cpu:  # straight to the device, without a copy on the way
        settings["device_map"] = str(device)
    if new_head is not None and task == "classification":
        settings["num_labels"] = new_head

    with _gguf_read_once() if gguf else nullcontext():
        _expect_memory(name, where, gguf, dtype, device)
        with _quiet(f"the model {name}"):
            if nomic := _nomic(where, options):
                model = nomic.model(task, dtype, device)
                missing = ()
            else:
                whole = task != "base" or not _is_encoder_alone(name)
                loader = AUTO_CLASSES[task] if whole else "AutoModelForTextEncoding"
                model, report = getattr(library, loader).from_pretrained(
                    where, **options, **settings
                )
                missing = report["missing_keys"]
        if gguf:
            _note_types(model, Path(where) / gguf)
        own_tokenizer = load_tokenizer(name) if tokenizer else None
    inside = f"{model.base_model_prefix}."
    absent = [key for key in sorted(missing) if not str(key).startswith(inside)]
    if task in ("classification", "choice", "causal") and new_head is None and absent:
        raise InputError(
            f"{name} has no trained head for {task}: {absent[0]} is missing"
        )
    model = model.eval().requires_grad_(False)
    return Loaded(model, own_tokenizer, identity(model), str(name))


def _is_encoder_alone(name: str | Path) -> bool:
    """Return whether a checkpoint is the encoder of a pair, such as a T5EncoderModel."""
    if Path(name).suffix == ".gguf":
        return False
    config = load_config(name)
    ends = (str(each).endswith("EncoderModel") for each in config.architectures or ())
    return any(ends) and type(config) in transformers().MODEL_FOR_TEXT_ENCODING_MAPPING


def _own_dtype(name: str | Path) -> torch.dtype:
    """Return the precision in which a language model is stored; float32 for all other models."""
    own = getattr(load_config(name), "dtype", None)
    halved = own in (torch.float16, torch.bfloat16)
    return own if halved and task_of(name) == "causal" else torch.float32


def _expect_memory(
    name: str | Path,
    where: str,
    gguf: str | None,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Refuse a model that does not fit into memory, before any weights are read; log its size."""
    if is_folder(name):
        config = load_config(name)
        sizes = {size: getattr(config, size, 0) or 0 for size in _SIZES}
        for size, value in sizes.items():
            if not isinstance(value, int) or not 0 <= value < 2**63:
                raise InputError(
                    f"expected {size} as a whole number in {name}, got {value!r:.40}"
                )
        vocabulary, width, layers, inner = sizes.values()
        block = 4 * width * width + 2 * width * inner
        needed = dtype.itemsize * (vocabulary * width + layers * block)
        expect_memory(needed, f"the configuration of {name}", device, _FITS)
    needed = dtype.itemsize * _parameters(Path(where), gguf)
    expect_memory(needed, f"the model {name}", device, _FITS)
    if needed >= _LARGE:
        free = decimal(available(device))
        _log.info(
            "the weights of %s take %s of memory; %s free", name, decimal(needed), free
        )
        if torch.device(device).type == "cpu" and torch.cuda.is_available():
            _log.info(
                "this machine has a GPU, which is many times faster: --device cuda"
            )


def _parameters(where: Path, gguf: str | None) -> int:
    """Return how many numbers the files of weights hold by their headers; 0 if there are none."""
    if gguf:
        with _quiet(f"the model {where / gguf}"):
            reader = importlib.import_module("gguf").GGUFReader(where / gguf)
        return sum(int(tensor.n_elements) for tensor in reader.tensors)
    count = 0
    for path in where.glob("*.safetensors"):
        # A broken file is reported when its weights are read.
        with path.open("rb") as file, suppress(ValueError, TypeError, AttributeError):
            size = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            count += sum(math.prod(each["shape"]) for each in header.values())
    return count


def _note_types(model: Any, path: Path) -> None:
    """Note at each linear map the type of its weights in the file, by which a server rounds."""
    reader = importlib.import_module("gguf").GGUFReader(path)
    reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    architecture = reader.fields["general.architecture"].contents()
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    linear = [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]
    if architecture == NOMIC:
        tensors = {
            name: f"blk.{name.split('.')[1]}.ffn_up.weight" for name, _ in linear
        }
    else:
        processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
        names = reading.get_gguf_hf_weights_map(model, processor(config={}))
        tensors = {
            name.removesuffix(".weight"): tensor for tensor, name in names.items()
        }
    for name, module in linear:
        if tensors.get(name) in types:
            setattr(module, STORED, types[tensors[name]])


def task_of(name: str | Path) -> Task:
    """Return the task of a checkpoint's head by its configuration; "base" if it has no head."""
    if Path(name).suffix == ".gguf":
        return "base" if _nomic(*_source(str(name), allow_pickle=False)) else "causal"
    config = load_config(name)
    architectures: Any = config.architectures or ()
    if not isinstance(architectures, list | tuple):
        raise InputError(
            f"expected a list of architectures in {name}, got {architectures!r:.40}"
        )
    for architecture in cast("Sequence[Any]", architectures):
        task = named_task(str(architecture))
        if task == "seq2seq":  # does its encoder read text, as the library knows?
            known = transformers().MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            return task if type(config) in known else "base"
        if task != "base":
            return task
    return "base"


def load_config(name: str | Path) -> Any:
    """Load a checkpoint's configuration alone."""
    where, options = _source(str(name), allow_pickle=True)  # it is no pickle
    with _quiet(f"the configuration of {name}"):
        if nomic := _nomic(where, options):
            return nomic.config
        return transformers().AutoConfig.from_pretrained(where, **options)


def class_names(config: Any) -> list[str]:
    """Return the names of a classifier's classes, in order, by its configuration."""
    names = getattr(config, "id2label", None) or {}
    return [str(name) for _, name in sorted(names.items())]


def expect_names(given: Sequence[str], config: Any) -> None:
    """Refuse --classes with a name twice, or with another number of names than the model has."""
    known = class_names(config)
    if len(set(given)) < len(given):
        raise InputError(f"--classes names a class twice: {','.join(given)}")
    if given and len(known) > 1 and len(given) != len(known):
        raise InputError(f"--classes must name {len(known)} classes, not {len(given)}")


def load_tokenizer(name: str | Path) -> Any:
    """Load a model's tokenizer; without a padding token, it pads with the end-of-text token."""
    where, options = _source(str(name), allow_pickle=True)  # a tokenizer is no pickle
    with _quiet(f"the tokenizer of {name}"):
        if nomic := _nomic(where, options):
            tokenizer = nomic.tokenizer
        else:
            tokenizer = transformers().AutoTokenizer.from_pretrained(where, **options)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # The library makes an empty tokenizer where the files of a known family are
        # missing.
        raise InputError(f"{name} has no tokenizer with words")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save(loaded: Loaded, folder: str | Path) -> None:
    """Write weights as safetensors, configuration and tokenizer, which `load_model` reads."""
    try:
        with _quiet(f"a model to write to {folder}"):
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
    except InputError as error:
        raise unwritable(folder, error.__cause__ or error) from error


def _source(name: str, allow_pickle: bool) -> tuple[str, dict[str, Any]]:
    """Return where to load from and with which options; refuse what cannot be loaded."""
    path = Path(name)
    options = {"trust_remote_code": False}
    if not name.strip():
        raise InputError("name a model: a folder, a .gguf file, a hub name or demo")
    if path.suffix == ".gguf":
        expect_file(path, "a GGUF file")
        return str(path.parent), {**options, "gguf_file": path.name}
    if exists(path, links=True) and not is_folder(path):
        raise InputError(f"{name} is a file: give a folder, a .gguf file or a hub name")
    if not is_folder(path):
        if not _HUB_NAME.fullmatch(name):
            raise InputError(f"there is no model {name}: no such folder")
        if not _hub_answers():
            options["local_files_only"] = True
        return name, options
    if not (path / "config.json").is_file():
        raise InputError(f"{name} is not a model's folder: it has no config.json")
    for file in path.iterdir():  # the library would wait for ever at a pipe
        if not (file.is_file() or file.is_dir()):
            raise InputError(
                f"{file.name} in {name} is neither a file nor a folder: remove it"
            )
    pickled = any(path.glob("*.bin"))
    if not any(path.glob("*.safetensors")) and not (pickled and allow_pickle):
        rest = ", only pickled ones: --allow-pickle (allow_pickle=True) opens those you trust"
        raise InputError(
            f"{name} has no weights as .safetensors{rest if pickled else ''}"
        )
    return str(path), {**options, "local_files_only": True}


def _hub_answers() -> bool:
    """Return whether the hub answers; the library would try six times, for half a minute."""
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.get_session().head(
            hub.constants.ENDPOINT, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT
        )
    # no network, no name, no route, or offline by choice: use the local cache
    except Exception:
        return False
    return True


@contextmanager
def _gguf_read_once() -> Generator[None]:
    """Parse a GGUF file once: the library does for configuration, weights and tokenizer.

    The library also makes the same map of names for each module, and shows a progress
    bar that no setting hides.
    """
    gguf = importlib.import_module("gguf")
    reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    # A slice of a memmap calls Python, one of an array does not.
    class Reader(gguf.GGUFReader):
        data = property(
            lambda self: self.array,
            lambda self, file: setattr(self, "array", np.asarray(file)),
        )

    with ExitStack() as stack:
        for module, name, instead in (
            (gguf, "GGUFReader", cache(Reader)),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            (reading, "tqdm", partial(reading.tqdm, disable=True)),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, instead)
        yield


@contextmanager
def _quiet(what: str) -> Generator[None]:
    """Hide the library's progress bars and warnings, and make its failures one line.

    A broken folder may raise anything: OSError, ValueError, errors of JSON or
    safetensors.
    """
    bars_of = transformers().utils.logging
    loggers = [bars_of, importlib.import_module("huggingface_hub").utils.logging]
    levels = [logger.get_verbosity() for logger in loggers]
    bars = bars_of.is_progress_bar_enabled()
    for logger in loggers:
        logger.set_verbosity_error()
    bars_of.disable_progress_bar()
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"cannot load {what}: {why}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        if bars:
            bars_of.enable_progress_bar()


def identity(model: nn.Module, *, head: bool = False) -> str:
    """Return sixteen hexadecimal digits, equal for models that compute the same hidden states.

    With `head`, they are equal for models that give the same answers.
    """
    prefix = "" if head else str(getattr(model, "base_model_prefix", ""))
    base = cast("Any", getattr(model, prefix, model))
    config = base.config.to_dict()
    settings = {key: value for key, value in config.items() if key not in _NO_EFFECT}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in sorted(base.named_parameters()):
        if name.startswith("pooler") and not head:
            continue
        values = weight.detach().reshape(-1)
        steps = min(_SAMPLES, len(values))
        # float64: float32 cannot count the entries of a large table.
        chosen = torch.linspace(0, len(values) - 1, steps, dtype=torch.float64).long()
        sample = values[chosen.to(values.device)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


# A model that is in memory already, for example in training


def is_model(thing: object) -> bool:
    """Return whether this is a model of the transformers library, or looks like one."""
    return isinstance(thing, torch.nn.Module) and hasattr(thing, "config")


@contextmanager
def lent(
    model: Any,
    tokenizer: Any,
    name: str | None = None,
) -> Generator[Loaded]:
    """Give the model as attacks need it: in eval mode, without gradients, on a CPU in float32.

    Its modes, its gradients and the random state are restored. It is copied only to
    change the precision.
    """
    if tokenizer is None:
        raise InputError("a model in memory needs tokenizer=…")
    others = {
        weight.dtype
        for weight in model.parameters()
        if weight.is_floating_point() and not weight.is_cuda
    }
    if others - {torch.float32}:
        model = copy.deepcopy(model).float()
    gradients = [(weight, weight.requires_grad) for weight in model.parameters()]
    path = str(getattr(model.config, "_name_or_path", ""))
    called = name or path or type(model).__name__
    with evaluating(model):
        try:
            model.requires_grad_(False)
            yield Loaded(model, tokenizer, identity(model), called)
        finally:
            for weight, required in gradients:
                weight.requires_grad_(required)


# NomicBERT from a GGUF file, which transformers reads in other forms alone
#
# nomic-embed-text is the embedding model that several local servers come with.
# llama.cpp keeps the projections of queries, keys and values as one matrix, and marks
# tokens that begin a word with `▁` where BERT's vocabulary marks those that continue
# one with `##`.

NOMIC = "nomic-bert"
# The architecture as a file has it: the type of a value (a string), its length, the
# value.
_NAMED = b"general.architecture" + struct.pack("<IQ", 8, len(NOMIC)) + NOMIC.encode()
_FIRST = 4096  # bytes, among which a file has its architecture
_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    # of a block
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_layernorm",
}


def _nomic(where: str, options: dict[str, Any]) -> _NomicFile | None:
    """Return the GGUF file if it is of this architecture; only its beginning is read."""
    if "gguf_file" not in options:
        return None
    path = Path(where) / options["gguf_file"]
    with path.open("rb") as file:
        return _NomicFile(path) if _NAMED in file.read(_FIRST) else None


class _NomicFile:
    """A GGUF file of this architecture: configuration, model and tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def reader(self) -> Any:
        return importlib.import_module("gguf").GGUFReader(str(self.path))

    def _value(self, name: str) -> Any:
        field = self.reader.fields.get(f"{NOMIC}.{name}")
        if field is None:
            raise InputError(f"the GGUF file lacks {NOMIC}.{name}")
        return field.contents()

    @property
    def config(self) -> Any:
        tensors = {tensor.name: tensor.shape for tensor in self.reader.tensors}
        width = self._value("embedding_length")
        heads = self._value("attention.head_count")
        return transformers().NomicBertConfig(
            vocab_size=int(tensors["token_embd.weight"][1]),
            type_vocab_size=int(tensors["token_types.weight"][1]),
            hidden_size=width,
            num_hidden_layers=self._value("block_count"),
            num_attention_heads=heads,
            head_dim=width // heads,
            intermediate_size=self._value("feed_forward_length"),
            max_position_embeddings=self._value("context_length"),
            layer_norm_eps=self._value("attention.layer_norm_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self._value("rope.freq_base"),
            },
            architectures=["NomicBertModel"],
        )

    def model(
        self,
        task: str,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> Any:
        if task != "base":
            raise InputError(f"a GGUF file of {NOMIC} has no head for {task}")
        with torch.random.fork_rng():
            model = transformers().NomicBertModel(self.config)
        # every weight, or an error that names those missing
        model.load_state_dict(self._weights())
        return model.to(device, dtype)

    def _weights(self) -> dict[str, Tensor]:
        quants = importlib.import_module("gguf").quants
        found: dict[str, Tensor] = {}
        for tensor in self.reader.tensors:
            numbers = quants.dequantize(tensor.data, tensor.tensor_type)
            values = torch.from_numpy(np.array(numbers, dtype=np.float32))
            stem, _, ending = tensor.name.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
            inside, stem = (f"layers.{block[1]}.", block[2]) if block else ("", stem)
            if stem == "attn_qkv":
                for letter, part in zip("qkv", values.chunk(3), strict=True):
                    name = f"{inside}self_attn.{letter}_proj.{ending}"
                    found[name] = part.contiguous()
            elif stem in _NAMES:
                found[f"{inside}{_NAMES[stem]}.{ending}"] = values
            else:
                raise InputError(
                    f"the GGUF file has {tensor.name}, which {NOMIC} does not have"
                )
        return found

    @property
    def tokenizer(self) -> Any:
        tokens: list[str] = self.reader.fields["tokenizer.ggml.tokens"].contents()
        vocabulary = {_as_in_bert(token): number for number, token in enumerate(tokens)}
        return transformers().BertTokenizer(vocab=vocabulary)


def _as_in_bert(token: str) -> str:
    if token.startswith("▁"):
        return token[1:]
    return token if token[:1] == "[" and token[-1:] == "]" else f"##{token}"
