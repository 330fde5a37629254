"""From texts to vectors, many at once, and to log-probabilities of tokens.

A text is its tokens without the special ones that the tokenizer puts around it: the
first `lengths` (b,) of `ids` (b, n). A search compares vectors of length one. Their
inner product with the leaked vector is the cosine, which only the right text brings to
1, up to rounding.

A causal model also gives the probability of each token of a text after those before it,
at almost no extra cost, because it is run on every text anyway (`read`). Its last
states lie in a narrow cone. They vary most in what they predict, which many texts
share, while directions of little variance tell texts apart. So vectors may be whitened
(`whitening`), and then a cosine weighs all directions alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from keyhole.core.tensors import normalized, row_numbers
from keyhole.models.capture import Exposure, capture, pool
from keyhole.recover.attack import Target

_TOKENS = {"cuda": 1 << 19, "cpu": 1 << 11}  # in one pass
_ROUNDING = 1e-3  # of the largest variance: an upper bound on rounding
_ANSWERS = {
    "cuda": 1 << 13,
    "cpu": 1 << 8,
}  # positions whose log p over the vocabulary fit at once


@dataclass(frozen=True, eq=False)
class Texts:
    """b texts of at most n tokens, without special tokens."""

    ids: Tensor  # (b, n)
    lengths: Tensor  # (b,)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Texts:
        return Texts(self.ids[rows], self.lengths[rows])

    @property
    def mask(self) -> Tensor:
        """A mask (b, n), true on tokens."""
        places = torch.arange(self.ids.shape[-1], device=self.ids.device)
        return places < self.lengths[..., None]

    def clean(self) -> Texts:
        """Return the texts with zeros after their ends, so that equal texts are equal rows."""
        return Texts(self.ids.where(self.mask, 0), self.lengths)

    def padded(self, width: int) -> Texts:
        """Return the texts in a table of `width` columns, cut off where they are longer."""
        ids = self.ids[:, :width]
        ids = pad(ids, (0, width - ids.shape[1]))
        return Texts(ids, self.lengths.clamp(max=width))

    def tokens(self, row: int) -> list[int]:
        return self.ids[row, : int(self.lengths[row])].tolist()

    @classmethod
    def of(
        cls,
        lists: Sequence[Sequence[int]],
        max_length: int,
        device: Any = None,
    ) -> Texts:
        ids = [[*tokens, *[0] * (max_length - len(tokens))] for tokens in lists]
        lengths = [len(tokens) for tokens in lists]
        table = torch.tensor(ids, dtype=torch.long, device=device)
        return cls(
            table.view(len(lists), max_length), torch.tensor(lengths, device=device)
        )

    @classmethod
    def filled(cls, ids: Tensor) -> Texts:
        """Make b texts of n tokens each from ids (b, n)."""
        return cls(ids, torch.full_like(ids[:, 0], ids.shape[1]))

    @classmethod
    def cat(cls, parts: list[Texts], dim: int = 0) -> Texts:
        ids = [part.ids for part in parts]
        lengths = [part.lengths for part in parts]
        return cls(torch.cat(ids, dim), torch.cat(lengths, dim))


class Encoder:
    """Turns texts into vectors: exactly, or `fast`, in half precision where that is faster.

    Half precision is float16 on a GPU, and `half` on a CPU. `frame` are the special
    tokens before and after every text, by default the tokenizer's. `passes` counts the
    texts that were run, the unit of a search's cost. After `whiten` all vectors are
    whitened; to compare others with them, use `directions`.
    """

    def __init__(
        self,
        target: Target,
        exposure: Exposure | None = None,
        half: torch.dtype | None = None,
        frame: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self.target = target
        self.exposure = exposure or Exposure("pooled")
        self.device = target.parts.device
        self.before, self.after = target.frame() if frame is None else frame
        self.pad = target.pads()[0]
        self.passes = 0
        self._whitening: tuple[Tensor, Tensor] | None = None
        self._half = torch.float16 if self.device.type == "cuda" else half

    @cached_property
    def _fast(self) -> Any:
        model = self.target.model
        return copy.deepcopy(model).to(self._half) if self._half else model

    @property
    def table(self) -> Tensor:
        """The token embeddings (V, e)."""
        return self.target.parts.table

    def framed(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return the ids and the mask to run the model on, with special tokens in their places."""
        first = len(self.before)
        n = int(texts.lengths.max()) if len(texts) else 0
        ids = texts.ids[:, :n].where(texts.mask[:, :n], self.pad)
        ids = pad(ids, (first, len(self.after)), value=self.pad)
        ids[:, :first] = ids.new_tensor(self.before)
        ends = first + texts.lengths
        for token in self.after:
            ids[row_numbers(ids), ends] = token
            ends = ends + 1
        mask = Texts(ids, ends).mask
        return ids, mask.long()

    def whiten(self, texts: Texts) -> Tensor:
        """Whiten all vectors from now on by how these texts vary; return the vectors of these."""
        self._whitening = None
        vectors = self.vectors(texts, fast=True)
        self._whitening = whitening(vectors)
        return self.directions(vectors)

    def directions(self, values: Tensor) -> Tensor:
        """Return a model's vectors (b, d) in float32, whitened if set, with length one."""
        unit = normalized(values.float())
        if self._whitening is None:
            return unit
        mean, map_ = self._whitening
        return normalized((unit - mean) @ map_)

    def vectors(self, texts: Texts, fast: bool = False) -> Tensor:
        """Return the vectors (b, d) of texts in float32, whitened if set, with length one."""
        return self.directions(self.values(texts, fast))

    @torch.no_grad()
    def values(self, texts: Texts, fast: bool = False) -> Tensor:
        """Return what the model exposes of texts (b, d), unchanged."""
        model = self._fast if fast else self.target.model
        batches = self._batches(texts)
        given: list[Tensor] = []
        for rows in batches:
            ids, mask = self.framed(texts[rows])
            given.append(capture(model, self.exposure, ids=ids, mask=mask)["values"])
        return torch.cat(given)[torch.cat(batches).argsort()]

    def _batches(self, texts: Texts) -> list[Tensor]:
        """Return the rows of texts to run in one pass each, all of similar length."""
        self.passes += len(texts)
        length = texts.ids.shape[1] + 2
        most = _TOKENS[self.device.type]
        if self.device.type != "cpu":  # that many may not fit
            most = min(most, self.target.parts.at_once(length, modest=False))
        return list(texts.lengths.argsort().split(max(1, most // length)))

    @cached_property
    def predicts(self) -> bool:
        """Whether this is a causal model with its head, which predicts the next token."""
        if not self.target.parts.causal:
            return False
        return isinstance(self.target.model.get_output_embeddings(), nn.Linear)

    @torch.no_grad()
    def read(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Run texts fast, and return their vectors (b, d) and log p (b, n) of each token.

        The model must have a head (`predicts`). A token with no token before it has log
        p NaN.
        """
        batches = self._batches(texts)
        vectors: list[Tensor] = []
        log_p: list[Tensor] = []
        for rows in batches:
            ids, mask = self.framed(texts[rows])
            states = self._states(ids, mask)
            vectors.append(self.directions(pool(self.exposure, states, mask)))
            log_p.append(self._log_p(states, texts[rows]))
        order = torch.cat(batches).argsort()
        return torch.cat(vectors)[order], torch.cat(log_p)[order]

    @torch.no_grad()
    def next_log_p(self, texts: Texts) -> Tensor:
        """Return log p (b, n + 1, V) of every token in each gap of texts, as `read` does."""
        self.passes += len(texts)
        n = texts.ids.shape[1]
        states = self._before(self._states(*self.framed(texts)), n + 1)
        dtype = self._fast.get_output_embeddings().weight.dtype
        answers = [part.to(dtype) for part in self._answers(states.flatten(0, 1))]
        return torch.cat(answers).unflatten(0, states.shape[:2])

    def _answers(self, states: Tensor) -> Iterator[Tensor]:
        """Yield log p (…, V) of every token after states (m, d), a part at a time."""
        head = self._fast.get_output_embeddings()
        for part in states.split(_ANSWERS[self.device.type]):
            yield head(part.to(head.weight.dtype)).float().log_softmax(-1)

    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last layer's states (b, m, d) of framed texts."""
        last = Exposure("hidden", self.target.parts.layers)
        return capture(self._fast, last, ids=ids, mask=mask)["values"]

    def _before(self, states: Tensor, count: int) -> Tensor:
        """Return the states (b, count, d) before each of the first places of texts, or NaN."""
        first = len(self.before)
        rows = states[:, max(0, first - 1) :]
        nothing = max(0, 1 - first)
        rows = rows[:, : count - nothing]
        after = count - nothing - rows.shape[1]
        return pad(rows, (0, 0, nothing, after), value=torch.nan)

    def _log_p(self, states: Tensor, texts: Texts) -> Tensor:
        """Return log p (b, n) of each token of texts, from the states before it."""
        states = self._before(states, texts.ids.shape[1])
        inside = texts.mask
        tokens = texts.ids[inside][:, None].split(_ANSWERS[self.device.type])
        pairs = zip(self._answers(states[inside]), tokens, strict=True)
        own = [answers.gather(1, some)[:, 0] for answers, some in pairs]
        log_p = torch.full(texts.ids.shape, torch.nan, device=self.device)
        log_p[inside] = torch.cat(own)
        return log_p

    def gradient(
        self, texts: Texts, of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return numbers (b,) `of` what the model exposes, and the gradients (b, n, e) of each."""
        self.passes += len(texts)
        ids, mask = self.framed(texts)
        words = self.target.parts.tokens(ids)
        numbers, slopes = self.target.slopes(
            self.exposure, words, lambda given: of(given["values"]), mask
        )
        n = texts.ids.shape[1]
        first = len(self.before)
        slopes = slopes[:, first : first + n]
        return numbers, pad(slopes, (0, 0, 0, n - slopes.shape[1]))


def matrix_half() -> torch.dtype | None:
    """Return the half precision that this CPU has matrix units for: 3 times as fast as float32."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    return torch.bfloat16 if torch.cpu.get_capabilities().get("amx_bf16") else None


def whitening(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return an affine map of vectors (b, d) to equal variance in all directions.

    With mean μ and covariance C = U diag(λ) Uᵀ over some texts, v becomes (v − μ) U
    diag(λ + ε)^-½; μ and the matrix are returned. ε is a share of the largest λ, so that
    rounding does not count as much as the text. If b < d, all other directions count
    alike.
    """
    mean = vectors.double().mean(0)
    off = vectors.double() - mean
    spread, axes = torch.linalg.eigh(off.T @ off / len(off))
    scale = (spread.clamp(min=0) + _ROUNDING * spread[-1].clamp(min=1e-30)).rsqrt()
    return mean.to(vectors), (axes * scale).to(vectors)
