"""Texts from the experts that a mixture-of-experts model chose for each token.

*Expert Selections In MoE Models Reveal (Almost) As Much As Text* (Nuriyev and Kulp,
arXiv 2602.04105) trains a decoder on 100 million tokens, which recovers 91.2% of the
tokens of texts of 32 tokens, for another model and other texts than here. Here nothing
is trained: whoever has the weights runs the router. The choices at position i,

    S_ℓ(x_1 … x_i) = the k experts of layer ℓ with the largest logits,

depend only on the tokens up to i. So the text is read from left to right: every token
of the vocabulary is appended to every prefix that fits so far, and those are kept whose
choices are the leaked ones at all layers. If one text remains and none that fitted was
dropped, it is the only one with these choices, and `verified`. If several remain, the
one that the model finds most likely is returned.

`--texts` texts of `--length` tokens are DREAM's turns, in a vocabulary of `--words`
tokens that is trained on other turns. `--parts`:

    random   Mixtral's architecture with random weights, for several numbers of layers and experts
    trained  the same after training on DREAM for `--steps` steps of `--batch` texts

Each text is read from the choices alone, then from the choices and the routers'
probabilities to four digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
import subjects
from show import Row

PARTS = ["random", "trained"]
SIZES = [
    (2, 8, 2),
    (4, 8, 2),
    (8, 8, 2),
    (1, 8, 2),
    (8, 8, 1),
    (8, 32, 4),
]  # layers, experts, k
WIDTH = 128
HEADS = 4
INNER = 128
BATCH = 4096  # candidate tokens in one pass
TOLERANCE = 1e-4  # of probabilities that count as equal
MARGIN = 1e-4  # of the range of logits, for sums in another order


def run(
    quick: bool,
    data: Path = subjects.DATA,
    device: str = subjects.DEVICE,
    parts: list[str] = PARTS,
    texts: int = 10,
    length: int = 32,
    words: int = 2048,
    steps: int = 400,
    batch: int = 32,
    most: int = 16,
) -> Iterator[Row]:
    if quick:
        ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
        yield from rows("random", mixture(64, 4, 8, 2, "cpu"), ids, 2, most)
        return
    tokenizer = spelled(subjects.turns(data, "train"), words)
    ids = stream(tokenizer, subjects.turns(data, "dev"), length)[:texts].to(device)
    if "random" in parts:
        for layers, experts, chosen in SIZES:
            model = mixture(words, layers, experts, chosen, device)
            yield from rows("random", model, ids, chosen, most)
    if "trained" in parts:
        training = stream(tokenizer, subjects.turns(data, "train"), length).to(device)
        for layers, experts, chosen in SIZES[:3]:
            model = mixture(words, layers, experts, chosen, device)
            loss = train(model, training, steps, batch)
            name = f"trained to a loss of {loss:.2f}"
            yield from rows(name, model, ids, chosen, most)


@dataclass(frozen=True)
class ExpertsRead:
    """The result: `ids` is the most likely text with these choices, one of `left` texts.

    `certain` is the number of first tokens in which all texts that fit agree, before
    any that fitted was dropped.
    """

    ids: list[int]
    verified: bool
    certain: int
    left: int


@torch.no_grad()
def router_logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits (texts, tokens, layers, experts) of all routers."""
    out = model(input_ids=ids, output_router_logits=True, **options)
    return torch.stack([each.view(*ids.shape, -1) for each in out.router_logits], 2)


def choices_of(logits: Tensor, experts: int) -> Tensor:
    """Return the experts with the largest logits of each router, (…, layers, experts)."""
    return logits.topk(experts, -1).indices


def read_choices(
    model: Any,
    choices: Tensor,
    *,
    probabilities: Tensor | None = None,
    most: int = 16,
) -> ExpertsRead:
    """Read the text from choices (tokens, layers, experts); at most `most` prefixes are kept."""
    prefixes: list[tuple[float, list[int]]] = [(0.0, [])]
    certain = 0
    dropped = False
    for position, chosen in enumerate(choices.to(model.device)):
        known = None if probabilities is None else probabilities[position]
        longer = [
            (likelihood + more, [*prefix, token])
            for likelihood, prefix in prefixes
            for token, more in fitting(model, prefix, chosen, known)
        ]
        if not longer:
            break
        longer.sort(reverse=True)
        dropped |= len(longer) > most
        prefixes = longer[:most]
        if not dropped:
            columns = zip(*(text for _, text in prefixes), strict=True)
            agree = [len(set(column)) == 1 for column in columns]
            certain = [*agree, False].index(False)
    ids = prefixes[0][1]
    left = len(prefixes) if len(ids) == len(choices) else 0
    return ExpertsRead(ids, left == 1 and not dropped, certain, left)


@torch.no_grad()
def fitting(
    model: Any, prefix: list[int], chosen: Tensor, known: Tensor | None
) -> Iterator[tuple[int, float]]:
    """Yield the next tokens for which the routers choose `chosen`, with log-probabilities."""
    vocabulary = torch.arange(model.config.vocab_size, device=model.device)
    scores = torch.zeros(len(vocabulary))
    for tokens in vocabulary.split(BATCH):
        options: dict[str, Any] = {}
        if prefix:
            before = model(input_ids=tokens.new_tensor([prefix]), use_cache=True)
            scores = before.logits[0, -1].log_softmax(-1)
            before.past_key_values.batch_repeat_interleave(len(tokens))
            options["past_key_values"] = before.past_key_values
        logits = router_logits(model, tokens[:, None], **options)[:, 0]
        inside = torch.zeros_like(logits[0], dtype=torch.bool)
        inside.scatter_(-1, chosen, True)
        least = logits.masked_fill(~inside, torch.inf).amin(-1)
        others = logits.masked_fill(inside, -torch.inf).amax(-1)
        margin = MARGIN * (logits.amax(-1) - logits.amin(-1))
        fits = (least >= others - margin).all(-1)
        if known is not None:
            off = (logits.softmax(-1) - known.to(logits)).abs()
            fits &= (off <= TOLERANCE).flatten(1).all(1)
        for token in tokens[fits].tolist():
            yield token, float(scores[token])


def spelled(lines: list[str], words: int) -> Any:
    """Train a byte-level tokenizer of so many tokens on these lines."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(lines, vocab_size=words, show_progress=False)
    return made


def stream(tokenizer: Any, lines: list[str], length: int) -> Tensor:
    """Return texts (texts, length) cut from the joined lines."""
    ids = [token for each in tokenizer.encode_batch(lines) for token in each.ids]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def mixture(words: int, layers: int, experts: int, chosen: int, device: str) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        max_position_embeddings=512,
        router_aux_loss_coef=0.02,
    )
    return MixtralForCausalLM(config).to(device).eval()


def train(model: Any, texts: Tensor, steps: int, batch: int) -> float:
    """Train, and return the mean loss of the last tenth of the steps."""
    draw = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(texts), (batch,), generator=draw).to(texts.device)
        out = model(
            input_ids=texts[chosen], labels=texts[chosen], output_router_logits=True
        )
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(out.loss.detach()))
    model.eval()
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def rows(name: str, model: Any, ids: Tensor, chosen: int, most: int) -> Iterator[Row]:
    config = model.config
    what = f"{name}, {config.num_hidden_layers} layers, {chosen} of {config.num_local_experts}"
    for more in ("", " and probabilities"):
        items: list[dict[str, Any]] = []
        for text in ids:
            logits = router_logits(model, text[None])
            shares = logits[0].softmax(-1).mul(1e4).round() / 1e4 if more else None
            read, seconds = show.timed(
                lambda logits=logits, shares=shares: read_choices(
                    model,
                    choices_of(logits, chosen)[0],
                    probabilities=shares,
                    most=most,
                )
            )
            secret = text.tolist()
            items.append(
                {
                    "tokens": len(secret),
                    "exact": read.ids == secret,
                    "verified": read.verified,
                    "right": sum(map(int.__eq__, read.ids, secret)),
                    "certain": read.certain,
                    "left": read.left,
                    "seconds": round(seconds, 2),
                }
            )
        tokens, right = (
            sum(item[each] for item in items) for each in ("tokens", "right")
        )
        true, false = subjects.claims(items)
        yield Row(
            f"{what}, choices{more}",
            f"{right / tokens:.1%} of {tokens} tokens, {true + false} of {len(items)} texts "
            f"verified, {false} falsely",
            "0 falsely",
            not false,
            f"{sum(item['certain'] for item in items)} tokens certain; "
            f"{sum(item['seconds'] for item in items) / len(items):.1f} s per text",
            items=items,
        )


if __name__ == "__main__":
    show.main(run)
