"""Models from folders, from the hub and from GGUF files: safetensors only, never remote code.

On a GPU a language model's weights keep the checkpoint's own precision: a service computes in it,
and twice the memory may not be there. Others, and all of them on a CPU, are float32: encoders are
small, classifiers may be trained, and arithmetic in half precision is slow on a CPU.

The library chooses how attention is computed, mostly without ever holding a whole attention map, so
that memory does not grow with the square of a text's length. `capture` asks for maps where needed.

A pickled checkpoint can run any code when it is opened, so it is refused without
`allow_pickle=True`. Code that a checkpoint brings along is never run.

`identity` names a model by what it computes: its configuration and its weights (every name and
shape, and a sample of the values), without the head, so that a leak can name the model it is of.
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
from torch import Tensor, nn

from keyhole.core.errors import InputError, MissingExtra, expect_among, first_line
from keyhole.core.files import exists, expect_file, is_folder, unwritable
from keyhole.core.machine import available, expect_device, expect_memory, shown

T = TypeVar("T")
STORED = "stored_as"  # of a linear map: the type in which a GGUF file has its weights
_log = logging.getLogger(__name__)
_LARGE = 2**30  # bytes: what smaller models take is not worth a line
_HEADER = 2**27  # bytes that the header of a file of weights may have
_FITS = "choose a smaller model, or a GPU with more memory (--device cuda)"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/[\w.-]{1,96})?")
_SAMPLES = 32  # values of each tensor that go into the identity
_NO_EFFECT = frozenset({  # settings that leave hidden states as they are
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "id2label",
    "label2id", "problem_type", "_attn_implementation", "output_attentions",
    "output_hidden_states", "return_dict", "use_cache", "gradient_checkpointing",
    "quantization_config", "chunk_size_feed_forward", "tie_word_embeddings",
})  # fmt: skip


# Tasks: what a model's head is for, in the same words everywhere.
#
# | task | answers with |
# |---|---|
# | base | no head: hidden states |
# | classification | one class of a text (or an image) |
# | choice | one of several texts |
# | causal | the next token |
# | seq2seq | the next token of a decoder, given a text |

Task = Literal["base", "classification", "choice", "causal", "seq2seq"]
GENERATES = ("causal", "seq2seq")  # these need no labels: what they generate is the right answer
AUTO_CLASSES: dict[str, str] = {  # the library's classes that load a model with such a head
    "base": "AutoModel",
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "choice": "AutoModelForMultipleChoice",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
_ENDINGS: dict[str, Task] = {  # how the library names classes with a head
    "ForTokenClassification": "base",  # a class for each token is no answer to a text
    "Classification": "classification",
    "Classifier": "classification",
    "ForMultipleChoice": "choice",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "seq2seq",
    "MTModel": "seq2seq",
}


def named_task(architecture: str) -> Task:
    """The task that an architecture's name ends in; "base" where it is none of those above."""
    for ending, task in _ENDINGS.items():
        if architecture.endswith(ending):
            return task
    return "base"


def head_of(model: Any) -> Task:
    """The task that a model's head is for; "base" where it has none of those above."""
    task = named_task(type(model).__name__)
    if task == "seq2seq" and not getattr(model.config, "is_encoder_decoder", False):
        return "base"  # it writes about images, or sounds
    return task


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be attacked: in eval, no gradients for its weights."""

    model: Any
    tokenizer: Any
    identity: str
    name: str


def transformers() -> Any:
    """The transformers library; where it is missing, an error that says how to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtra("transformers is not installed", "models") from error


_lock = threading.RLock()  # a cluster's worker may have several threads, but memory for one model
_kept: list[tuple[Any, Any, ExitStack]] = []  # key, value and what closes it: one entry or none


@contextmanager
def kept_open(key: object, make: Callable[[ExitStack], T]) -> Generator[T]:
    """What `make` opens, kept for the next call with an equal key: workers open a model once.

    The process has this one cache. It holds one value, which is closed before the next is opened.
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


def load_model(
    name: str | Path,
    *,
    task: str = "base",
    allow_pickle: bool = False,
    tokenizer: bool = True,
    device: str | torch.device = "cpu",
    new_head: int | None = None,
) -> Loaded:
    """A model and its tokenizer from a folder, `folder/file.gguf`, or a name on the hub.

    `task` adds a head: "base" (none), "causal", "classification", "choice" or "seq2seq". A head
    that the checkpoint does not hold would be random, so it is refused; `new_head` asks for a new
    head with that many classes, to be trained.
    """
    expect_among("the task", task, AUTO_CLASSES)
    where, options = _source(str(name), allow_pickle)
    library = transformers()
    arguments = {**options, "trust_remote_code": False}

    if new_head is not None and task == "classification":
        arguments["num_labels"] = new_head

    expect_device(device)
    on_cpu = torch.device(device).type == "cpu"
    dtype = torch.float32 if on_cpu else _own_dtype(name)
    placed = {} if on_cpu else {"device_map": str(device)}  # straight there, no copy on the way

    def load_weights() -> Any:
        if nomic := _nomic(where, options):
            if task != "base":
                raise InputError(f"a GGUF file of {NOMIC} has no head for {task}")
            return nomic.model(dtype, device), {"missing_keys": ()}
        return getattr(library, AUTO_CLASSES[task]).from_pretrained(
            where, **arguments, **_weights(options, allow_pickle), **placed, dtype=dtype,
            output_loading_info=True,
        )  # fmt: skip

    with _gguf_read_once() if "gguf_file" in options else nullcontext():
        _expect_memory(name, where, options, dtype, device)
        model, report = _quietly(load_weights, f"the model {name}")
        if "gguf_file" in options:
            _note_types(model, Path(where) / options["gguf_file"])
        own_tokenizer = load_tokenizer(name) if tokenizer else None
    inside = f"{model.base_model_prefix}."
    absent = [key for key in sorted(report["missing_keys"]) if not str(key).startswith(inside)]
    if task in ("classification", "choice", "causal") and new_head is None and absent:
        raise InputError(f"{name} has no trained head for {task}: {absent[0]} is missing")
    model = model.eval().requires_grad_(False)
    return Loaded(model, own_tokenizer, identity(model), str(name))


def _own_dtype(name: str | Path) -> torch.dtype:
    """The precision in which a language model is stored; float32 for all others."""
    own = getattr(load_config(name), "dtype", None) if task_of(name) == "causal" else None
    return own if own in (torch.float16, torch.bfloat16) else torch.float32


def _expect_memory(
    name: str | Path,
    where: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Refuse a model that would not fit into memory, before any weights are read; else say it."""
    if is_folder(name):
        config = load_config(name)
        sizes = {size: getattr(config, size, 0) or 0 for size in _SIZES}
        for size, value in sizes.items():
            if not isinstance(value, int) or not 0 <= value < 2**63:
                raise InputError(f"expected {size} as a whole number in {name}, got {value!r:.40}")
        vocabulary, width, layers, inner = sizes.values()
        parameters = vocabulary * width + layers * (4 * width * width + 2 * width * inner)
        expect_memory(dtype.itemsize * parameters, f"the configuration of {name}", device, _FITS)
    needed = dtype.itemsize * _parameters(Path(where), options)
    expect_memory(needed, f"the model {name}", device, _FITS)
    if needed >= _LARGE:
        free = shown(available(device))
        _log.info("the weights of %s take %s of memory; %s free", name, shown(needed), free)
        if torch.device(device).type == "cpu" and torch.cuda.is_available():
            _log.info("this machine has a GPU, which is many times faster: --device cuda")


def _parameters(where: Path, options: dict[str, Any]) -> int:
    """How many numbers the files of weights hold, by their headers; 0 where none are here yet."""
    if "gguf_file" in options:
        reader = _quietly(
            lambda: importlib.import_module("gguf").GGUFReader(where / options["gguf_file"]),
            f"the model {where / options['gguf_file']}",
        )
        return sum(int(tensor.n_elements) for tensor in reader.tensors)
    count = 0
    for path in where.glob("*.safetensors"):
        with path.open("rb") as file, suppress(ValueError, TypeError, AttributeError):
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _HEADER)))
            header.pop("__metadata__", None)
            count += sum(math.prod(each["shape"]) for each in header.values())
    return count  # whoever reads a broken file says so


def _note_types(model: Any, path: Path) -> None:
    """Note at each linear map in which type the file has its weights: a server rounds by it."""
    reader = importlib.import_module("gguf").GGUFReader(path)
    reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    architecture = reader.fields["general.architecture"].contents()
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    if architecture == NOMIC:
        given = {name: f"blk.{name.split('.')[1]}.ffn_up.weight" for name, _ in _linear(model)}
    else:
        processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
        names = reading.get_gguf_hf_weights_map(model, processor(config={}))
        given = {name.removesuffix(".weight"): tensor for tensor, name in names.items()}
    for name, module in _linear(model):
        if given.get(name) in types:
            setattr(module, STORED, types[given[name]])


def _linear(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]


def task_of(name: str | Path) -> Task:
    """The task that a checkpoint's head is for, by its configuration; "base" where it has none."""
    if Path(name).suffix == ".gguf":
        return "base" if _nomic(*_source(str(name), allow_pickle=False)) else "causal"
    architectures: Any = load_config(name).architectures or ()
    if not isinstance(architectures, list | tuple):
        raise InputError(f"expected a list of architectures in {name}, got {architectures!r:.40}")
    for architecture in cast("Sequence[Any]", architectures):
        task = named_task(str(architecture))
        if task != "base":
            return task if task != "seq2seq" or _reads_text(load_config(name)) else "base"
    return "base"


def _reads_text(config: Any) -> bool:
    """Is this an encoder and a decoder whose encoder reads text, as far as the library knows?"""
    return type(config) in transformers().MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def load_config(name: str | Path) -> Any:
    """A checkpoint's configuration alone."""
    where, options = _source(str(name), allow_pickle=True)  # it is no pickle

    def load() -> Any:
        if nomic := _nomic(where, options):
            return nomic.config
        return transformers().AutoConfig.from_pretrained(where, **options, trust_remote_code=False)

    return _quietly(load, f"the configuration of {name}")


def class_names(config: Any) -> list[str]:
    """The names of a classifier's classes, in order, by its configuration."""
    return [str(name) for _, name in sorted((getattr(config, "id2label", None) or {}).items())]


def expect_names(given: Sequence[str], config: Any) -> None:
    """Refuse --classes with a name twice, or with another number of them than the model has."""
    known = class_names(config)
    if len(set(given)) < len(given):
        raise InputError(f"--classes names a class twice: {','.join(given)}")
    if given and len(known) > 1 and len(given) != len(known):
        raise InputError(f"--classes must name {len(known)} classes, not {len(given)}")


def load_tokenizer(name: str | Path) -> Any:
    """A model's tokenizer alone; without a padding token, it pads with the end-of-text token."""
    where, options = _source(str(name), allow_pickle=True)  # a tokenizer is no pickle
    tokenizer = _tokenizer(str(name), where, {**options, "trust_remote_code": False})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save(loaded: Loaded, folder: str | Path) -> None:
    """Weights as safetensors, configuration and tokenizer: what `load_model` takes."""

    def write() -> None:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)

    try:
        _quietly(write, f"a model to write to {folder}")
    except InputError as error:
        raise unwritable(folder, error.__cause__ or error) from error


def _tokenizer(name: str, where: str, arguments: dict[str, Any]) -> Any:

    def load() -> Any:
        if nomic := _nomic(where, arguments):
            return nomic.tokenizer
        return transformers().AutoTokenizer.from_pretrained(where, **arguments)

    tokenizer = _quietly(load, f"the tokenizer of {name}")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # The library makes an empty tokenizer where the files of a known family are missing.
        raise InputError(f"{name} has no tokenizer with words")
    return tokenizer


def _source(name: str, allow_pickle: bool) -> tuple[str, dict[str, Any]]:
    """Where to load from, and with which options; refuses before loading what cannot load."""
    path = Path(name)
    if not name.strip():
        raise InputError("name a model: a folder, a .gguf file, a hub name or demo")
    if path.suffix == ".gguf":
        expect_file(path, "a GGUF file")
        return str(path.parent), {"gguf_file": path.name}
    if exists(path, links=True) and not is_folder(path):
        raise InputError(f"{name} is a file: give a folder, a .gguf file or a hub name")
    if not is_folder(path):
        if not _HUB_NAME.fullmatch(name):
            raise InputError(f"there is no model {name}: no such folder")
        return name, {} if _hub_answers() else {"local_files_only": True}
    if not (path / "config.json").is_file():
        raise InputError(f"{name} is not a model's folder: it has no config.json")
    for file in path.iterdir():  # the library would wait for ever at a pipe
        if not (file.is_file() or file.is_dir()):
            raise InputError(f"{file.name} in {name} is neither a file nor a folder: remove it")
    pickled = any(path.glob("*.bin"))
    if not any(path.glob("*.safetensors")) and not (pickled and allow_pickle):
        rest = ", only pickled ones: pass allow_pickle=True if you trust them" if pickled else ""
        raise InputError(f"{name} has no weights as .safetensors{rest}")
    return str(path), {"local_files_only": True}


def _nomic(where: str, options: dict[str, Any]) -> _NomicFile | None:
    """A GGUF file that is read here, because the library does not; no more of it is read yet."""
    if not options.get("gguf_file"):
        return None
    path = Path(where) / options["gguf_file"]
    with path.open("rb") as file:
        return _NomicFile(path) if _NAMED in file.read(_FIRST) else None


def _hub_answers() -> bool:
    """Is the hub there? The library itself would try six times, for half a minute."""
    hub = importlib.import_module("huggingface_hub")
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # no network, no name, no route, or offline by choice: use the local cache
        return False
    return True


@contextmanager
def _gguf_read_once() -> Generator[None]:
    """Read a GGUF file's fields once: the library does for configuration, weights and tokenizer.

    It also makes the same map of names for each module, and draws a bar that no setting hides.
    """
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:  # the library says so
        yield
        return
    reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    class Reader(gguf.GGUFReader):  # a slice of a memmap calls Python, one of an array does not
        data = property(
            lambda self: self.array, lambda self, file: setattr(self, "array", np.asarray(file))
        )

    with ExitStack() as stack:
        for where, name, instead in (
            (gguf, "GGUFReader", cache(Reader)),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            (reading, "tqdm", partial(reading.tqdm, disable=True)),
        ):
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, instead)
        yield


def _weights(options: dict[str, Any], allow_pickle: bool) -> dict[str, Any]:
    if "gguf_file" in options:
        return {}
    return {"use_safetensors": None if allow_pickle else True}


def _quietly(load: Callable[[], Any], what: str) -> Any:
    """Load without progress bars and warnings; any failure of the library becomes one line."""
    bars_of = transformers().utils.logging
    loggers = [bars_of, importlib.import_module("huggingface_hub").utils.logging]
    levels, bars = [logger.get_verbosity() for logger in loggers], bars_of.is_progress_bar_enabled()
    for logger in loggers:
        logger.set_verbosity_error()
    bars_of.disable_progress_bar()
    try:
        return load()
    except Exception as error:
        # Whatever a broken folder provokes (OSError, ValueError, JSON, safetensors): one line.
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"cannot load {what}: {why}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        if bars:
            bars_of.enable_progress_bar()


def identity(model: nn.Module, *, head: bool = False) -> str:
    """Sixteen hexadecimal digits, the same for two models that compute the same hidden states.

    With `head`, the same for two that give the same answers.
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


# A model that is in memory already, for example in training.
#
# Attacks need a model in eval mode, without gradients for its weights, on a CPU in float32. `lent`
# puts it into that state for a block and restores it afterwards; only to change the precision is it
# copied.


def is_model(thing: object) -> bool:
    """Is this a model of the transformers library, or something that looks like one?"""
    return isinstance(thing, torch.nn.Module) and hasattr(thing, "config")


@contextmanager
def lent(model: Any, tokenizer: Any, name: str | None = None) -> Generator[Loaded]:
    """The model as attacks need it; its mode, gradients and random state are restored."""
    if tokenizer is None:
        raise InputError("a model in memory needs tokenizer=…")
    if any(
        weight.is_floating_point() and weight.dtype != torch.float32 and not weight.is_cuda
        for weight in model.parameters()
    ):
        model = copy.deepcopy(model).float()
    modes = {part: part.training for part in model.modules()}
    gradients = [(weight, weight.requires_grad) for weight in model.parameters()]
    called = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    gpus = {weight.device for weight in model.parameters() if weight.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus, key=str)):
        try:
            model.eval().requires_grad_(False)
            yield Loaded(model, tokenizer, identity(model), called)
        finally:
            for part, training in modes.items():
                part.training = training
            for weight, required in gradients:
                weight.requires_grad_(required)


# NomicBERT from a GGUF file, which the transformers library has as a model but not in that form.
#
# nomic-embed-text is the embedding model that several local servers come with. llama.cpp keeps the
# projections of queries, keys and values as one matrix, and marks tokens that begin a word with `▁`
# where BERT's vocabulary marks those that go on with `##`.

NOMIC = "nomic-bert"
# As a file names it: the type of a value (a string), its length, the value.
_NAMED = b"general.architecture" + struct.pack("<IQ", 8, len(NOMIC)) + NOMIC.encode()
_FIRST = 4096  # bytes, in which a file says its architecture
_NAMES = {  # of a block
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "layer_output_norm": "post_mlp_layernorm",
}
_TABLES = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm": "embeddings.LayerNorm",
}


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
            raise InputError(f"the GGUF file does not say {NOMIC}.{name}")
        return field.contents()

    @property
    def config(self) -> Any:
        tensors = {tensor.name: tensor.shape for tensor in self.reader.tensors}
        return transformers().NomicBertConfig(
            vocab_size=int(tensors["token_embd.weight"][1]),
            type_vocab_size=int(tensors["token_types.weight"][1]),
            hidden_size=self._value("embedding_length"),
            num_hidden_layers=self._value("block_count"),
            num_attention_heads=self._value("attention.head_count"),
            head_dim=self._value("embedding_length") // self._value("attention.head_count"),
            intermediate_size=self._value("feed_forward_length"),
            max_position_embeddings=self._value("context_length"),
            layer_norm_eps=self._value("attention.layer_norm_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._value("rope.freq_base")},
            architectures=["NomicBertModel"],
        )

    def model(self, dtype: torch.dtype, device: str | torch.device) -> Any:
        with torch.random.fork_rng():
            model = transformers().NomicBertModel(self.config)
        model.load_state_dict(self._weights())  # every weight, or an error that names those missing
        return model.to(device, dtype)

    def _weights(self) -> dict[str, Tensor]:
        quants = importlib.import_module("gguf").quants
        found: dict[str, Tensor] = {}
        for tensor in self.reader.tensors:
            numbers = quants.dequantize(tensor.data, tensor.tensor_type)
            values = torch.from_numpy(np.array(numbers, dtype=np.float32))
            _, number, name = (
                tensor.name.split(".", 2) if tensor.name[:4] == "blk." else ("", "", "")
            )
            if name == "attn_qkv.weight":
                for letter, part in zip("qkv", values.chunk(3), strict=True):
                    found[f"layers.{number}.self_attn.{letter}_proj.weight"] = part.contiguous()
                continue
            names, given, inside = (
                (_NAMES, name, f"layers.{number}.") if name else (_TABLES, tensor.name, "")
            )
            stem, _, ending = given.rpartition(".")
            known = names.get(given) or (f"{names[stem]}.{ending}" if stem in names else None)
            if known is None:
                raise InputError(f"the GGUF file has {tensor.name}, which {NOMIC} does not have")
            found[inside + known] = values
        return found

    @property
    def tokenizer(self) -> Any:
        tokens: list[str] = self.reader.fields["tokenizer.ggml.tokens"].contents()
        return transformers().BertTokenizer(vocab={_written(t): n for n, t in enumerate(tokens)})


def _written(token: str) -> str:
    """A token as BERT's vocabulary has it."""
    if token.startswith("▁"):
        return token[1:]
    return token if token[:1] == "[" and token[-1:] == "]" else f"##{token}"
