"""Word substitutions against hardened classifiers: does resisting cuts help against new words?

MiniLM (`--encoder`) is trained on SST-2 with each method and seed (trained.py). The
first `--right` right answers are attacked by greedy substitution; flips are counted at
one word and at 10%, 20% and 30% of the words.

The attack is TextFooler (arXiv 1907.11932) without a thesaurus. A word that is one
token may be replaced by the nearest words whose embeddings have a cosine of at least
0.4 with its own, or (`masked`) by the predictions of a masked language model
(BERT-Attack, arXiv 2004.09984), which is trained here. Neighbours are not synonyms
("good" is near "bad"), so a flipped text may read differently to people. Words are
replaced in the order of what their removal costs the margin, each by the word that
leaves the smallest margin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import show
import subjects
import trained
from keyhole.data import Example, encode
from keyhole.disrupt.batches import Batches
from keyhole.models import Loaded
from show import Row
from trained import Options, Run, Task, Tiny, spread

MAX_LENGTH = 128
SHARES = (0.1, 0.2, 0.3)
RANKINGS = ["leave-one-out", "masked"]
LEAST = torch.finfo(torch.float32).min  # below every score of a word


def run(
    quick: bool,
    options: Options = Options(methods=["plain", "sattend:0.2", "strongest"]),  # noqa: B008
    rankings: list[str] = RANKINGS,
) -> Iterator[Row]:
    trained.expect_known("rankings", rankings, RANKINGS)
    if options.join:
        runs = trained.joined(options.join)
        yield from trained.kept(runs)
        yield from table(runs)
        return
    if quick:
        options = Tiny(epochs=4, batch=16, rate=3e-3, right=6)
    task = Task("sst2", *options.sst2(), 2, 128, 1e-4, MAX_LENGTH).given(options)
    proposing = None
    if "masked" in rankings:
        texts = [example.text for example in task.train]
        texts += [] if quick else subjects.turns(options.data, "train")
        proposing = MaskedModel.trained(options.fresh(0), texts)
    for method, seed in options.trainings:
        loaded = options.fresh(seed)
        settings = trained.train(loaded, task, method, seed, options)["settings"]
        known: Run = {"method": method, "seed": seed, "settings": settings}
        loaded.model.eval().requires_grad_(False)
        right = trained.right_answers(
            Batches(loaded.model, loaded.tokenizer, task.dev, 64, MAX_LENGTH)
        )
        known["accuracy"] = len(right) / len(task.dev)
        words = {word for example in task.train for word in example.text.split()}
        victim = Victim(loaded.model, loaded.tokenizer, words)
        for ranking in rankings:
            attack = WordSubstitution(max(SHARES), ranking=ranking, masked=proposing)
            attack = replace(attack, cosine=0.1) if quick else attack
            yield measured(known, attack, victim, right[: options.right])


def measured(
    known: Run, attack: WordSubstitution, victim: Victim, right: list[Example]
) -> Row:
    def outcome(example: Example) -> dict[str, Any]:
        text, queries = attack(victim, example)
        return {**judged(victim, example, text), "queries": queries}

    outcomes, seconds = show.timed(lambda: list(map(outcome, right)))
    run: Run = {
        **known,
        "ranking": attack.ranking,
        "nearest": attack.nearest,
        "cosine": attack.cosine,
        "outcomes": outcomes,
        "seconds": seconds,
    }
    return replace(row([run]), run=run)


def flips(run: Run, share: float) -> float:
    """Return the share of right answers flipped by this share of words; 0 means one word."""
    allowed = WordSubstitution(share).most
    each = [
        outcome["flipped"] and outcome["changed"] <= allowed(outcome["words"])
        for outcome in run["outcomes"]
    ]
    return sum(each) / max(1, len(each))


def row(runs: list[Run]) -> Row:
    """Return the mean and range over runs that differ only by their seeds."""
    first = runs[0]
    amounts = {"one word": 0.0} | {
        f"{share:.0%} of the words": share for share in SHARES
    }
    shown = [
        f"{name} {spread([flips(run, share) for run in runs])}"
        for name, share in amounts.items()
    ]
    outcomes = [outcome for run in runs for outcome in run["outcomes"]]
    queries = mean(outcome["queries"] for outcome in outcomes) if outcomes else 0.0
    details = (
        f"{'; '.join(shown)}; clean {spread([run['accuracy'] for run in runs])}; "
        f"{len(outcomes)} right answers, {queries:.0f} queries each; cosine {first['cosine']:g}, "
        f"{first['nearest']} neighbours; seeds {', '.join(str(run['seed']) for run in runs)}; "
        f"{sum(run['seconds'] for run in runs):.0f} s"
    )
    return Row(
        f"{first['method']}, ranked by {first['ranking']}", shown[-1], details=details
    )


def table(runs: list[Run]) -> Iterator[Row]:
    def kind(run: Run) -> tuple[Any, ...]:
        return tuple(run[name] for name in ("method", "ranking", "nearest", "cosine"))

    for each in dict.fromkeys(map(kind, runs)):
        yield row([run for run in runs if kind(run) == each])


@dataclass(frozen=True)
class WordSubstitution:
    share: float = 0.2
    nearest: int = 8
    cosine: float = 0.4
    ranking: str = "leave-one-out"
    masked: MaskedModel | None = None

    def most(self, words: int) -> int:
        return max(1, int(self.share * words + 1e-9))

    def others(self, victim: Victim, words: Sequence[str], place: int) -> list[str]:
        if self.ranking == "masked" and self.masked is not None:
            return self.masked.words(victim, words, place, 6 * self.nearest)
        return victim.neighbours(words[place], self.nearest, self.cosine)

    def __call__(self, victim: Victim, example: Example) -> tuple[str, int]:
        """Return the text that the attack proposes, and its queries."""
        words = example.text.split()
        options = {
            place: others
            for place in range(len(words))
            if (others := self.others(victim, words, place))
        }
        margin = float(victim.margins([words], example.label)[0])
        order = list(options)
        without = [
            [*words[:place], victim.unknown, *words[place + 1 :]] for place in order
        ]
        worth = victim.margins(without, example.label)
        queries = 1 + len(order)
        changed = 0
        for number in worth.argsort(stable=True).tolist():
            if margin < 0 or changed == self.most(len(words)):
                break
            place = order[number]
            tried = [
                [*words[:place], other, *words[place + 1 :]] for other in options[place]
            ]
            margins = victim.margins(tried, example.label)
            queries += len(tried)
            best = int(margins.argmin())
            if float(margins[best]) < margin:
                words = tried[best]
                margin = float(margins[best])
                changed = changed + 1
        return " ".join(words), queries


@dataclass(frozen=True, eq=False)
class MaskedModel:
    """A masked language model, trained here with 15% of the tokens masked."""

    model: Any

    @classmethod
    def trained(
        cls, loaded: Loaded, texts: Sequence[str], steps: int = 2_000
    ) -> MaskedModel:
        import transformers

        device = loaded.model.device
        steps = steps if device.type == "cuda" else 20
        model = transformers.BertForMaskedLM(loaded.model.config).to(device).train()
        model.bert.load_state_dict(loaded.model.base_model.state_dict(), strict=False)
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), 2e-4)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-4, steps)
        stream = torch.Generator().manual_seed(0)
        mask = loaded.tokenizer.mask_token_id or 0
        for _ in range(steps):
            chosen = torch.randint(len(texts), (128,), generator=stream).tolist()
            few = [Example(str(number), 0, texts[number]) for number in chosen]
            batch, _ = encode(loaded.tokenizer, few, max_length=64)
            special = batch.pop("special_tokens_mask").bool()
            hidden = (torch.rand(special.shape, generator=stream) < 0.15) & ~special
            labels = torch.where(hidden, batch["input_ids"], -100)
            batch["input_ids"] = torch.where(hidden, mask, batch["input_ids"])
            given = {name: value.to(device) for name, value in batch.items()}
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda"
            ):
                loss = model(**given, labels=labels.to(device)).loss
            if bool(hidden.any()):
                loss.backward()
                optimizer.step()
            rates.step()
            optimizer.zero_grad()
        return cls(model.eval().requires_grad_(False))

    def words(
        self, victim: Victim, words: Sequence[str], place: int, count: int
    ) -> list[str]:
        """Return the likeliest other words at a position; none unless its word is one token."""
        own = victim.token(words[place])
        start = victim.starts(words)[place]
        batch = victim.batch([Example("0", 0, " ".join(words))])
        if own is None or start >= batch["input_ids"].shape[1]:
            return []
        with torch.no_grad():
            scores = self.model(**batch).logits[0, start].float()
        return victim.best(words[place], own, scores, count)


class Victim:
    """A classifier with its tokenizer, and the words that the attack may use."""

    def __init__(self, model: Any, tokenizer: Any, words: Collection[str]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.words = words
        self.unknown = str(tokenizer.unk_token)

    @cached_property
    def table(self) -> Tensor:
        """The token embeddings, scaled to unit length."""
        weight = self.model.get_input_embeddings().weight.detach()
        return torch.nn.functional.normalize(weight.double(), dim=1)

    @cached_property
    def names(self) -> list[str]:
        """Every token as written; "" unless it is a word of letters."""
        special = set(self.tokenizer.all_special_ids)
        written = self.tokenizer.convert_ids_to_tokens(range(len(self.table)))
        return [
            name
            if number not in special and name in self.words and name.isalpha()
            else ""
            for number, name in enumerate(written)
        ]

    @cached_property
    def usable(self) -> Tensor:
        return torch.tensor(
            [bool(name) for name in self.names], device=self.table.device
        )

    def token(self, word: str) -> int | None:
        """Return the token of a word of letters; None unless it is exactly one."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and word.isalpha() and self.names[ids[0]]:
            return ids[0]
        return None

    def neighbours(self, word: str, nearest: int, cosine: float) -> list[str]:
        """Return the nearest words, nearest first; none unless the word is one token."""
        own = self.token(word)
        if own is None:
            return []
        return self.best(word, own, self.table @ self.table[own], nearest, cosine)

    def best(
        self, word: str, own: int, scores: Tensor, count: int, least: float = LEAST
    ) -> list[str]:
        """Return the words with the best scores (tokens,), other than `own` and in its case."""
        scores = scores.masked_fill(~self.usable, -torch.inf)
        scores[own] = -torch.inf
        values, ids = scores.topk(min(count, len(scores)))
        known = zip(values.tolist(), ids.tolist(), strict=True)
        others = [
            (self.names[number], number) for value, number in known if value >= least
        ]
        # The tokenizer must turn the word back into the same token.
        return [
            other
            for other, number in others
            if other.islower() == word.islower()
            and other[:1].isupper() == word[:1].isupper()
            and self.token(other) == number
        ]

    def margins(self, texts: Sequence[Sequence[str]], label: int) -> Tensor:
        """Return the label's logit minus the best other's for each text."""
        if not texts:
            return torch.zeros(0)
        examples = [
            Example(str(n), label, " ".join(words)) for n, words in enumerate(texts)
        ]
        with torch.no_grad():
            logits = self.model(**self.batch(examples)).logits.float().cpu()
        own = logits[:, label].clone()
        logits[:, label] = -torch.inf
        return own - logits.amax(1)

    def starts(self, words: Sequence[str]) -> list[int]:
        """Return the position of each word's first token in the encoded text."""
        frame = self.tokenizer("", add_special_tokens=True)["input_ids"]
        place = min(1, len(frame))
        starts = list[int]()
        for word in words:
            starts.append(place)
            place += len(self.tokenizer(word, add_special_tokens=False)["input_ids"])
        return starts

    def batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch, _ = encode(self.tokenizer, examples, max_length=MAX_LENGTH)
        batch.pop("special_tokens_mask")
        return {name: value.to(self.model.device) for name, value in batch.items()}


def judged(victim: Victim, example: Example, text: str) -> dict[str, int]:
    """Count the words that differ, and run the model on the text alone."""
    before = example.text.split()
    after = text.split()
    changed = sum(old != new for old, new in zip(before, after, strict=True))
    flipped = float(victim.margins([after], example.label)[0]) < 0
    return {"flipped": flipped, "changed": changed, "words": len(before)}


if __name__ == "__main__":
    show.main(run)
