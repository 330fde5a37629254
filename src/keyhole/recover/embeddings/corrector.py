"""A trained model that corrects a text by how far its vector is from the one looked for (ours).

Everything else that reads embeddings counts (counts.py). This is trained, for minutes on a GPU, and
used only where it is given. It sees a text x, its vector e(x) and the vector e of the text that is
looked for, and says which token should stand at each place of x (or none), and which one is missing
from each gap:

    p(token at place i | x, e(x), e),    p(token in gap i | x, e(x), e)

It begins as a copy of the encoder's first layers, with a few states made of e, e(x) and e − e(x)
before the text. It is trained on pieces of a corpus in which some tokens are replaced by any
others, so that vectors have to be read rather than guessed. What it corrects are these texts with
tokens replaced, left out, put in and moved, other texts, and what it made of such texts before, so
that it learns from its own mistakes (Ross, Gordon and Bagnell, 2011). The right answers are those
of the alignment with the fewest changes (Levenshtein).

It knows vectors as the search compares them, so the whitening is kept with the weights.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from keyhole.core.errors import InputError, expect_count, expect_seed
from keyhole.core.progress import Track, untracked
from keyhole.models import Loaded
from keyhole.models.demo import open_model
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import Counted, corpus_texts, gumbel
from keyhole.recover.embeddings.encoder import Encoder, Texts, Whitening

_LAYERS = 6  # of the encoder that are copied
_STATES = 6  # before the text
_RATE = 4e-4  # of learning, at 384 numbers a state
_WARM = 100  # steps
_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 9}  # in a batch
_NEAR = 8  # tokens with the nearest embeddings
_FRESH = 0.35  # of a batch begins anew after each step
_SAMPLED = 0.2  # of the right tokens are trained on, weighted as if all were
_ANSWERS = 4  # times the texts of a batch: answers that are trained on
_ROWS = 1 << 14  # answers over the vocabulary that are held at once
_DRAWN = 8  # answers that corrections are drawn from
_SHORTEST = 3  # tokens of a text that is trained on
_WHITENING = ("mean", "map")
_SHARES = (0.3, 0.55, 0.75, 1.0)  # of the longest text, that batches have


class Corrector(nn.Module):
    """Answers for each place (head 0) and each gap (head 1) of a text; the pad token says none."""

    def __init__(self, encoder: Encoder, dim: int) -> None:
        super().__init__()
        base, width = encoder.target.parts.base, encoder.table.shape[1]
        inner = getattr(base.config, "hidden_size", width)
        self.dim, self.none, self.end = dim, encoder.pad, (encoder.after or [encoder.pad])[0]
        self.base = copy.deepcopy(base).float().requires_grad_(True)
        _cut(self.base, len(encoder.target.parts.blocks))
        self.given = nn.Sequential(
            nn.Linear(3 * dim + 2, 2 * width), nn.GELU(), nn.Linear(2 * width, _STATES * width)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(inner, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(2)
        )
        self.table = nn.Parameter(encoder.table.detach().float().clone())
        self.to(encoder.device)

    def forward(self, texts: Texts, vectors: Tensor, goals: Tensor) -> Tensor:
        """States (b, n + 1, s) of each token and of the end, for vectors and goals (b, d)."""
        off, scale = goals - vectors, math.sqrt(self.dim)
        size = off.norm(dim=-1, keepdim=True).clamp(min=1e-4)
        seen = [goals * scale, vectors * scale, off * (scale / size), size, size.log()]
        front = self.given(torch.cat(seen, -1)).unflatten(-1, (_STATES, -1))
        n = int(texts.lengths.max())
        places = torch.arange(n + 1, device=vectors.device)
        ids = pad(texts.ids[:, :n], (0, 1)).where(places != texts.lengths[:, None], self.end)
        words = self.base.get_input_embeddings()(ids)
        mask = pad((places <= texts.lengths[:, None]).long(), (_STATES, 0), value=1)
        words = torch.cat([front.to(words.dtype), words], 1)
        return self.base(inputs_embeds=words, attention_mask=mask).last_hidden_state[:, _STATES:]

    def answers(self, states: Tensor, head: int) -> Tensor:
        """Logits (…, V) from states (…, s)."""
        return self.heads[head](states) @ self.table.T

    @torch.no_grad()
    def likeliest(
        self, texts: Texts, vectors: Tensor, goals: Tensor, count: int
    ) -> list[tuple[Tensor, Tensor]]:
        """For places (b, n, count) and gaps (b, n + 1, count): the largest log p, their tokens."""
        made: list[tuple[Tensor, Tensor]] = []
        with _half(vectors):
            states = self(texts, vectors, goals)
            for head in (0, 1):
                tops: list[tuple[Tensor, Tensor]] = []
                for logits in self._logits(texts, states, head):
                    top = logits.float().topk(count)
                    total = logits.float().logsumexp(1, keepdim=True)
                    tops.append((top.values - total, top.indices))
                values, tokens = map(torch.cat, zip(*tops, strict=True))
                shape = (len(texts), -1, count)
                made.append((values.view(shape), tokens.view(shape)))
        return made

    def best(self, texts: Texts, states: Tensor) -> list[Tensor]:
        """The likeliest token for each place (b, n) and each gap (b, n + 1), from states."""
        return [
            torch.cat([logits.argmax(1) for logits in self._logits(texts, states, head)]).view(
                len(texts), -1
            )
            for head in (0, 1)
        ]

    def _logits(self, texts: Texts, states: Tensor, head: int) -> Iterator[Tensor]:
        """Logits (…, V) for places (head 0) or gaps, some at a time.

        Few of the answers that change nothing were trained on, and those are worth more for it.
        """
        usual = torch.full(states.shape[:2], self.none, device=states.device)
        if head == 0:
            states, usual = states[:, :-1], texts.ids[:, : states.shape[1] - 1]
        parts = states.flatten(0, 1).split(_ROWS), usual.flatten()[:, None].split(_ROWS)
        for part, leave in zip(*parts, strict=True):
            logits = self.answers(part, head)
            more = torch.full_like(logits[:, :1], -math.log(_SAMPLED))
            yield logits.scatter_add_(1, leave, more)

    def corrected(
        self, texts: Texts, vectors: Tensor, goals: Tensor, count: int, max_length: int,
        generator: torch.Generator,
    ) -> Texts:  # fmt: skip
        """`count` corrections (b·count) of each text: the likeliest, then some that are drawn."""
        made: list[Tensor] = []
        device = vectors.device
        share = torch.rand(len(texts), count, 1, generator=generator, device=device).sqrt()
        share[:, 0], heat = 1.0, (torch.arange(count, device=device) > 0)[:, None, None]
        for log_p, tokens in self.likeliest(texts, vectors, goals, _DRAWN):
            wide = log_p[:, None].expand(-1, count, -1, -1)
            drawn = (wide + heat * gumbel(wide, generator)).argmax(-1, keepdim=True)
            chosen = tokens[:, None].expand_as(wide).gather(3, drawn)[..., 0]
            leave = torch.full_like(chosen, self.none)
            if not made:
                leave = texts.ids[:, None, : chosen.shape[2]].expand_as(chosen)
            kept = torch.rand(chosen.shape, generator=generator, device=device) < share
            made.append(chosen.where(kept, leave).flatten(0, 1))
        rows = torch.arange(len(texts), device=device).repeat_interleave(count)
        return self.applied(texts[rows], *made, max_length)

    def applied(self, texts: Texts, replaced: Tensor, put_in: Tensor, max_length: int) -> Texts:
        """Texts with tokens (b, n) at their places and (b, n + 1) in their gaps, or none there."""
        n = replaced.shape[1]
        inside = torch.arange(n + 1, device=put_in.device) <= texts.lengths[:, None]
        both = torch.full((len(texts), 2 * n + 1), -1, device=put_in.device)
        both[:, 0::2] = put_in.where((put_in != self.none) & inside, -1)
        both[:, 1::2] = replaced.where((replaced != self.none) & texts.mask[:, :n], -1)
        return _packed(both, max_length)

    def save(self, file: str | Path, encoder: Encoder, texts: Sequence[str]) -> None:
        """Keep it in a file, with the texts that it was trained on."""
        tensors = {name: tensor.half().contiguous() for name, tensor in self.state_dict().items()}
        tensors["texts"] = torch.tensor(list("\n".join(texts).encode()), dtype=torch.uint8)
        if encoder.whitening is not None:
            tensors |= {
                f"whitening.{name}": getattr(encoder.whitening, name) for name in _WHITENING
            }
        save_file(tensors, file)


def load_corrector(file: str | Path, encoder: Encoder) -> Corrector:
    """A corrector as it was saved, for this encoder, which then whitens as it did."""
    try:
        tensors = load_file(file, device=str(encoder.device))
        del tensors["texts"]
        kept = [tensors.pop(f"whitening.{name}", None) for name in _WHITENING]
        encoder.whitening = None if kept[0] is None else Whitening(*kept)
        model = Corrector(encoder, tensors["given.0.weight"].shape[1] // 3)
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise InputError(f"{file} was not trained for this encoder: {error}") from None
    return model.eval().requires_grad_(False)


def _half(like: Tensor) -> AbstractContextManager[None]:
    """Half precision where matrices are multiplied, on a GPU."""
    return torch.autocast("cuda", torch.bfloat16, enabled=like.is_cuda)


def _cut(base: nn.Module, layers: int) -> None:
    """Leave the first layers of a model, and no dropout."""
    for module in list(base.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == layers:
                setattr(module, name, child[:_LAYERS])


def _packed(slots: Tensor, max_length: int) -> Texts:
    """Texts of the tokens that are not -1 in each row (b, m), at least one of them."""
    order = (slots < 0).long().argsort(dim=1, stable=True)
    lengths = (slots >= 0).sum(1).clamp(min=1)
    return Texts(slots.gather(1, order).clamp(min=0), lengths).padded(max_length).clean()


def aligned(texts: Texts, truths: Texts, none: int) -> tuple[Tensor, Tensor]:
    """What should stand at each place (b, n), and what is missing from each gap (b, n + 1).

    D(i, j), the fewest changes from the first i tokens to the first j of the truth, row by row:
    the running minimum of D(i, k) − k takes care of tokens that are put in.
    """
    b, n, m = len(texts), texts.ids.shape[1], truths.ids.shape[1]
    device = texts.ids.device
    steps = torch.arange(m + 1, device=device)
    rows = [steps.expand(b, -1)]
    other = texts.ids[:, :, None] != truths.ids[:, None]
    for i in range(n):
        above = rows[-1]
        least = torch.minimum(above[:, 1:] + 1, above[:, :-1] + other[:, i])
        least = torch.cat([above[:, :1] + 1, least], 1)
        rows.append((least - steps).cummin(1).values + steps)
    table = torch.stack(rows, 1)
    wanted = torch.full((b, n), none, device=device)
    missing = torch.full((b, n + 1), none, device=device)
    every, i, j = torch.arange(b, device=device), texts.lengths.clone(), truths.lengths.clone()
    for _ in range(n + m):
        up, left = (i - 1).clamp(min=0), (j - 1).clamp(min=0)
        now, token = table[every, i, j], truths.ids[every, left]
        across = (i > 0) & (j > 0) & (now == table[every, up, left] + other[every, up, left])
        away = ~across & (i > 0) & (now == table[every, up, j] + 1)
        gap = ~across & ~away & (j > 0)
        wanted[every, up] = token.where(across, wanted[every, up])
        missing[every, i] = token.where(gap, missing[every, i])
        i, j = i - (across | away).long(), j - (across | gap).long()
    return wanted, missing


@dataclass(eq=False)
class _Pieces:
    """Pieces of a corpus, and texts that might be mistaken for them."""

    encoder: Encoder
    flat: Tensor  # the tokens of all lines
    bounds: Tensor
    common: Tensor  # (V,) how often each token is drawn
    near: Tensor  # (V, _NEAR)
    generator: torch.Generator

    @classmethod
    def of(
        cls, encoder: Encoder, lines: Sequence[Sequence[int]], special: Tensor, seed: int
    ) -> _Pieces:
        device, size = encoder.device, len(encoder.table)
        flat = torch.tensor([token for line in lines for token in line], device=device)
        bounds = torch.tensor([0, *map(len, lines)], device=device).cumsum(0)
        common = flat.bincount(minlength=size).float() + 0.05
        common[special] = 0
        table = normalize(encoder.table.float(), dim=-1)
        near = [(part @ table.T).topk(_NEAR + 1).indices[:, 1:] for part in table.split(2048)]
        generator = torch.Generator(device).manual_seed(seed)
        return cls(encoder, flat, bounds, common, torch.cat(near), generator)

    def chance(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.flat.device)

    def below(self, limits: Tensor) -> Tensor:
        """A whole number from 0 to each limit, without it."""
        return (self.chance(*limits.shape) * limits).long()

    def truths(self, count: int, width: int) -> Texts:
        """Pieces of at most `width` tokens, half of them whole lines where those fit."""
        line = self.below(self.bounds.new_full((count,), len(self.bounds) - 1))
        size = self.bounds[line + 1] - self.bounds[line]
        least = max(_SHORTEST, width // 2)
        cut = least + self.below(size.new_full((count,), width - least + 1))
        length = torch.minimum(cut.where(self.chance(count) < 0.5, width), size).clamp(min=1)
        start = self.bounds[line] + self.below(size - length + 1)
        places = start[:, None] + torch.arange(width, device=start.device)
        ids = self.flat[places.clamp(max=len(self.flat) - 1)]
        share = 0.3 * self.chance(count, 1) * (self.chance(count, 1) < 0.5)
        drawn = self.below(torch.full_like(ids, len(self.common)))
        new = (self.chance(*ids.shape) < share) & (self.common[drawn] > 0)
        return Texts(drawn.where(new, ids), length).clean()

    def mistaken(self, texts: Texts, max_length: int) -> Texts:
        """Texts with changes of every kind; some are others altogether."""
        (b, n), mask, generator = texts.ids.shape, texts.mask, self.generator
        rate = self.chance(b, 1)
        drawn = torch.multinomial(self.common, 2 * b * n, True, generator=generator).view(2, b, n)
        which = self.below(torch.full_like(texts.ids, _NEAR))[..., None]
        like = self.near[texts.ids].gather(2, which)[..., 0]
        wrong = drawn[0].where(self.chance(b, n) < 0.5, like)
        shown = texts.ids.where(self.chance(b, n) >= rate, wrong)
        slots = torch.full((b, 2 * n), -1, device=mask.device)
        slots[:, 0::2] = drawn[1].where((self.chance(b, n) < 0.12 * rate) & mask, -1)
        slots[:, 1::2] = shown.where((self.chance(b, n) >= 0.15 * rate) & mask, -1)
        made = _packed(slots, max_length)
        places = torch.arange(max_length, device=mask.device)
        spread = 3 * (self.chance(b, 1) < 0.3) * self.chance(b, 1)
        moved = places + spread * (gumbel(made.ids, generator).clamp(-2, 4))
        order = moved.where(made.mask, math.inf).argsort(dim=1)
        made = Texts(made.ids.gather(1, order), made.lengths)
        other = texts.padded(max_length)[torch.randperm(b, generator=generator, device=mask.device)]
        far = self.chance(b) < 0.25
        ids = other.ids.where(far[:, None], made.ids)
        return Texts(ids, other.lengths.where(far, made.lengths)).clean()


@dataclass(eq=False)
class _Batch:
    """Texts of one length that are corrected again and again."""

    truths: Texts
    goals: Tensor
    texts: Texts

    @classmethod
    def of(cls, pieces: _Pieces, width: int, dim: int) -> _Batch:
        device = pieces.flat.device
        count = max(2, _TOKENS[device.type] // (width + _STATES))
        ids = torch.zeros(count, width + max(2, width // 8), dtype=torch.long, device=device)
        goals, ones = torch.zeros(count, dim, device=device), torch.ones_like(ids[:, 0])
        batch = cls(Texts(ids[:, :width].clone(), ones.clone()), goals, Texts(ids, ones))
        batch.renew(pieces, 1.0)
        return batch

    def renew(self, pieces: _Pieces, share: float) -> None:
        """Take new texts in the place of some."""
        rows = (pieces.chance(len(self.truths)) < share).nonzero().flatten()
        if not len(rows):
            return
        truths = pieces.truths(len(rows), self.truths.ids.shape[1])
        texts = pieces.mistaken(truths, self.texts.ids.shape[1])
        for held, new in ((self.truths, truths), (self.texts, texts)):
            held.ids[rows], held.lengths[rows] = new.ids, new.lengths
        self.goals[rows] = pieces.encoder.vectors(truths, fast=True).float()

    @torch.no_grad()
    def correct(self, model: Corrector, states: Tensor, pieces: _Pieces) -> None:
        """Go on from what the model makes of the texts, with some or all of its changes."""
        with _half(states):
            replaced, put_in = model.best(self.texts, states)
        share = pieces.chance(len(self.texts), 1).sqrt()
        replaced = replaced.where(
            pieces.chance(*replaced.shape) < share, self.texts.ids[:, : replaced.shape[1]]
        )
        put_in = put_in.where(pieces.chance(*put_in.shape) < share, model.none)
        self.texts = model.applied(self.texts, replaced, put_in, self.texts.ids.shape[1])
        self.renew(pieces, _FRESH)


def train_corrector(
    model: str | Loaded,
    corpus: str | Path | Sequence[str],
    out: str | Path,
    *,
    seconds: float = 180.0,
    max_length: int = 34,
    device: str = "cuda",
    allow_pickle: bool = False,
    seed: int = 0,
    track: Track = untracked,
) -> int:
    """Train a corrector for an encoder's mean-pooled embeddings, and keep it in the file `out`.

    Gives the number of texts of the corpus.
    """
    expect_count("max_length", max_length)
    expect_seed(seed)
    if not seconds > 0:
        raise InputError("seconds must be more than 0")
    loaded = model
    if isinstance(loaded, str):
        loaded = open_model(loaded, device=device, allow_pickle=allow_pickle)
    texts = corpus_texts(corpus)
    lines = loaded.tokenizer(texts, add_special_tokens=False, truncation=False)["input_ids"]
    counted = Counted.of(Encoder(Target.of(loaded.model, loaded.tokenizer)), lines, max_length)
    train(counted, lines, max_length, seconds, seed, track).save(out, counted.encoder, texts)
    return len(texts)


def train(
    counted: Counted, lines: Sequence[Sequence[int]], max_length: int, seconds: float,
    seed: int = 0, track: Track = untracked,
) -> Corrector:  # fmt: skip
    """A corrector of texts of up to `max_length` tokens, from the token lists of a corpus."""
    encoder, dim = counted.encoder, counted.vectors.shape[1]
    torch.manual_seed(seed)
    model = Corrector(encoder, dim).train()
    pieces = _Pieces.of(encoder, [line for line in lines if line], counted.special, seed)
    widths = sorted({max(_SHORTEST, round(max_length * share)) for share in _SHARES})
    batches = [_Batch.of(pieces, width, dim) for width in widths]
    rate = _RATE * math.sqrt(min(1.0, 384 / encoder.table.shape[1]))
    optimiser = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.98), weight_decay=0.01)
    progress = track("training a corrector", round(seconds))
    began, step = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / _WARM) * (1 - spent / seconds) ** 0.7
        batch = batches[step % len(batches)]
        loss, states = _loss(model, batch, pieces)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        batch.correct(model, states.detach(), pieces)
        step += 1
        if step % 50 == 0:
            words = f"{step:,} steps, loss {float(loss.detach()):.2f}"
            progress(min(round(seconds), round(spent)), note=words)
    return model.eval().requires_grad_(False)


def _loss(model: Corrector, batch: _Batch, pieces: _Pieces) -> tuple[Tensor, Tensor]:
    """The loss of some answers for a batch, all that change something first; and the states."""
    texts = batch.texts
    vectors = pieces.encoder.vectors(texts, fast=True).float()
    wanted, missing = aligned(texts, batch.truths, model.none)
    with _half(vectors):
        states = model(texts, vectors, batch.goals)
        n = states.shape[1] - 1
        ends = torch.arange(n + 1, device=vectors.device) <= texts.lengths[:, None]
        total = states.new_zeros(())
        for head, right, usual, inside in (
            (0, wanted[:, :n], texts.ids[:, :n], texts.mask[:, :n]),
            (1, missing[:, : n + 1], torch.full_like(missing[:, : n + 1], model.none), ends),
        ):
            some = inside & ((right != usual) | (pieces.chance(*right.shape) < _SAMPLED))
            rows, places = some.nonzero().unbind(1)
            drawn = torch.randperm(len(rows), generator=pieces.generator, device=rows.device)
            drawn = drawn[: _ANSWERS * len(texts)]
            rows, places = rows[drawn], places[drawn]
            logits = model.answers(states[rows, places], head)
            total = total + cross_entropy(logits.float(), right[rows, places])
    return total, states
