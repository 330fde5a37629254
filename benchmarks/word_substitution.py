"""Flip a classifier by other words: greedy substitution by neighbours in its table of embeddings.

The attack on texts that robust training is usually tried with (TextFooler, arXiv 1907.11932, and
its kin), reduced to what the model itself offers: no thesaurus, no sentence encoder. A word may be
replaced where it is one token, by the `nearest` words whose embeddings have a cosine of at least
`cosine` with its own: words of letters that stand in some text (a token may also be the beginning
of words), written in the same case, none of them special. Neighbours are not synonyms ("good" and
"bad" are near): it says how little a model withstands, not that people would read the same.

Words are taken in the order of what their loss does to the margin (`leave-one-out`: each is
replaced by the unknown token), or of what the best substitution does to first order (`gradient`).
The two differ most where a table was learnt from the task alone: there the neighbours of the words
that matter say the same, and flips come from the neighbours of words that do not.
At each the substitution with the smallest margin stays, if it is smaller than before; the first
flip ends it. At most `share` of a text's words are replaced, and one in any case.

The attack proposes a text; `judged` counts the words that differ and asks the model afresh, from
the text itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from keyhole.data import Example, encode

LONGEST = 128


@dataclass(frozen=True)
class Substituted:
    """What the attack proposes: the text, and what it cost."""

    text: str
    queries: int


@dataclass(frozen=True)
class Judged:
    """What a fresh look at the text says."""

    flipped: bool
    changed: int
    words: int


@dataclass(frozen=True)
class WordSubstitution:
    share: float = 0.2
    nearest: int = 8
    cosine: float = 0.4
    ranking: Literal["leave-one-out", "gradient"] = "leave-one-out"

    def most(self, words: int) -> int:
        return max(1, int(self.share * words + 1e-9))

    def __call__(self, victim: Victim, example: Example) -> Substituted:
        words = example.text.split()
        options = {
            place: others
            for place, word in enumerate(words)
            if (others := victim.neighbours(word, self.nearest, self.cosine))
        }
        queries = 1
        margin = float(victim.margins([words], example.label)[0])
        order = list(options)
        if self.ranking == "leave-one-out":
            without = [[*words[:place], victim.unknown, *words[place + 1 :]] for place in order]
            worth = victim.margins(without, example.label)
            queries += len(order)
        else:
            worth = victim.slopes(words, options, example.label)
            queries += 1
        changed = 0
        for number in worth.argsort(stable=True).tolist():
            if margin < 0 or changed == self.most(len(words)):
                break
            place = order[number]
            tried = [[*words[:place], other, *words[place + 1 :]] for other in options[place]]
            margins = victim.margins(tried, example.label)
            queries += len(tried)
            best = int(margins.argmin())
            if float(margins[best]) < margin:
                words, margin, changed = tried[best], float(margins[best]), changed + 1
        return Substituted(" ".join(words), queries)


class Victim:
    """A classifier and its tokenizer, as the attack may use them, and the words that there are."""

    def __init__(self, model: Any, tokenizer: Any, words: Collection[str]) -> None:
        self.model, self.tokenizer, self.words = model, tokenizer, words
        self.unknown = str(tokenizer.unk_token)

    @cached_property
    def table(self) -> Tensor:
        """Embeddings, each of length 1."""
        weight = self.model.get_input_embeddings().weight.detach()
        return torch.nn.functional.normalize(weight.double(), dim=1)

    @cached_property
    def names(self) -> list[str]:
        """Every token as it is written, "" where it is no word of letters."""
        special = set(self.tokenizer.all_special_ids)
        written = self.tokenizer.convert_ids_to_tokens(range(len(self.table)))
        return [
            name if number not in special and name in self.words and name.isalpha() else ""
            for number, name in enumerate(written)
        ]

    @cached_property
    def usable(self) -> Tensor:
        return torch.tensor([bool(name) for name in self.names], device=self.table.device)

    def token(self, word: str) -> int | None:
        """The one token that a word of letters is; None where it is several, or something else."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        return ids[0] if len(ids) == 1 and word.isalpha() and self.names[ids[0]] else None

    def neighbours(self, word: str, nearest: int, cosine: float) -> list[str]:
        """The words nearest to this one, nearest first; none for what is no single token."""
        own = self.token(word)
        if own is None:
            return []
        close = self.table @ self.table[own]
        close = close.masked_fill(~self.usable, -torch.inf)
        close[own] = -torch.inf
        values, ids = close.topk(min(nearest, len(close)))
        known = zip(values.tolist(), ids.tolist(), strict=True)
        others = [(self.names[number], number) for value, number in known if value >= cosine]
        # Written into a text, a neighbour must come out of the tokenizer as that very token.
        return [
            other
            for other, number in others
            if _case(other) == _case(word) and self.token(other) == number
        ]

    def margins(self, texts: Sequence[Sequence[str]], label: int) -> Tensor:
        """The label's logit minus the best other's, for each text of words."""
        if not texts:
            return torch.zeros(0)
        examples = [Example(str(n), label, " ".join(words)) for n, words in enumerate(texts)]
        with torch.no_grad():
            return self._margins(self._batch(examples), label).cpu()

    def slopes(self, words: Sequence[str], options: dict[int, list[str]], label: int) -> Tensor:
        """What the best substitution at each place does to the margin, to first order."""
        table = self.model.get_input_embeddings()
        batch = self._batch([Example("0", label, " ".join(words))])
        seen: list[Tensor] = []

        def follow(_module: Any, _given: Any, output: Tensor) -> Tensor:
            seen.append(output.detach().requires_grad_(True))
            return seen[0]

        handle = table.register_forward_hook(follow)
        try:
            with torch.enable_grad():
                margin = self._margins(batch, label).sum()
                gradient = torch.autograd.grad(margin, seen[0])[0][0]
        finally:
            handle.remove()
        starts = self._starts(words)
        gains: list[float] = []
        for place, others in options.items():
            own = self.token(words[place])
            ids = [self.token(other) for other in others]
            if starts[place] >= len(gradient):  # beyond where the text is cut off
                gains.append(0.0)
                continue
            moved = table.weight[ids] - table.weight[own]
            gains.append(float((moved @ gradient[starts[place]]).min()))
        return torch.tensor(gains)

    def _starts(self, words: Sequence[str]) -> list[int]:
        """The position of each word's first token in the encoded text."""
        frame = self.tokenizer("", add_special_tokens=True)["input_ids"]
        place, starts = min(1, len(frame)), list[int]()
        for word in words:
            starts.append(place)
            place += len(self.tokenizer(word, add_special_tokens=False)["input_ids"])
        return starts

    def _batch(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch, _ = encode(self.tokenizer, examples, max_length=LONGEST)
        batch.pop("special_tokens_mask")
        return {name: value.to(self.model.device) for name, value in batch.items()}

    def _margins(self, batch: dict[str, Tensor], label: int) -> Tensor:
        logits = self.model(**batch).logits.float()
        others = logits.clone()
        others[:, label] = -torch.inf
        return logits[:, label] - others.amax(1)


def _case(word: str) -> tuple[bool, bool]:
    return word.islower(), word[:1].isupper()


def judged(victim: Victim, example: Example, proposal: Substituted) -> Judged:
    """How many words really differ, and what the model says of the text, asked alone."""
    before, after = example.text.split(), proposal.text.split()
    if len(before) != len(after):
        return Judged(False, max(len(before), len(after)), len(before))
    changed = sum(old != new for old, new in zip(before, after, strict=True))
    flipped = float(victim.margins([after], example.label)[0]) < 0
    return Judged(flipped, changed, len(before))
