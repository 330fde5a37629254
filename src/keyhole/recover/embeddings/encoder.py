"""From texts to vectors, many at once, and to log-probabilities of tokens.

A text is its tokens without the special ones that the tokenizer puts around it: the
first `lengths` (b,) of `ids` (b, n). A search compares vectors of length one. Their
inner product with the leaked vector is the cosine, which only the right text brings to
1, up to rounding.

A causal model also gives the probability of each token of a text after those before it,
at almost no extra cost, because it is run on every text anyway (`read`). Its last
states lie in a narrow cone. They vary most in what they predict, which many texts
share, while directions of little variance tell texts apart. So vectors may be whitened
(`Whitening`), and then a cosine weighs all directions alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

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
        return (
            torch.arange(self.ids.shape[-1], device=self.ids.device)
            < self.lengths[..., None]
        )

    def clean(self) -> Texts:
        """Return the texts with zeros after their ends, so that equal texts are equal rows."""
        return Texts(self.ids.where(self.mask, 0), self.lengths)

    def padded(self, width: int) -> Texts:
        """Return the texts in a table of `width` columns, cut off where they are longer."""
        ids = self.ids[:, :width]
        ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
        return Texts(ids, self.lengths.clamp(max=width))

    def tokens(self, row: int) -> list[int]:
        return self.ids[row, : int(self.lengths[row])].tolist()

    @classmethod
    def of(
        cls, lists: Sequence[Sequence[int]], max_length: int, device: Any = None
    ) -> Texts:
        ids = torch.zeros(len(lists), max_length, dtype=torch.long)
        for row, tokens in enumerate(lists):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in lists])
        return cls(ids.to(device), lengths.to(device))

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
        self._whitening: Whitening | None = None
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
        last = len(self.after)
        n = int(texts.lengths.max()) if len(texts) else 0
        ids = torch.full((len(texts), n + first + last), self.pad, device=self.device)
        ids[:, :first] = torch.tensor(self.before, device=self.device, dtype=torch.long)
        ids[:, first : first + n] = texts.ids[:, :n].where(texts.mask[:, :n], self.pad)
        rows = row_numbers(texts.ids)
        for place, token in enumerate(self.after):
            ids[rows, first + texts.lengths + place] = token
        places = torch.arange(ids.shape[1], device=self.device)
        mask = places < (texts.lengths + first + last)[:, None]
        return ids, mask.long()

    def whiten(self, texts: Texts) -> Tensor:
        """Whiten all vectors from now on by how these texts vary; return the vectors of these."""
        self._whitening = None
        vectors = self.vectors(texts, fast=True)
        self._whitening = Whitening.of(vectors)
        return self.directions(vectors)

    def directions(self, values: Tensor) -> Tensor:
        """Return a model's vectors (b, d) in float32, whitened if set, with length one."""
        unit = normalized(values.float())
        if self._whitening is None:
            return unit
        return normalized(self._whitening(unit))

    def vectors(self, texts: Texts, fast: bool = False) -> Tensor:
        """Return the vectors (b, d) of texts in float32, whitened if set, with length one."""
        return self.directions(self.values(texts, fast))

    @torch.no_grad()
    def values(self, texts: Texts, fast: bool = False) -> Tensor:
        """Return what the model exposes of texts (b, d), unchanged."""
        model = self._fast if fast else self.target.model

        def run(_: Texts, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
            return (capture(model, self.exposure, ids=ids, mask=mask)["values"],)

        return self._in_batches(texts, run)[0]

    def _in_batches(
        self, texts: Texts, run: Callable[[Texts, Tensor, Tensor], tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """Run texts in batches of similar length, and return the results in their own order."""
        self.passes += len(texts)
        length = texts.ids.shape[1] + 2
        most = _TOKENS[self.device.type]
        if self.device.type != "cpu":  # that many may not fit
            most = min(most, self.target.parts.at_once(length, modest=False))
        order = texts.lengths.argsort()
        batches = (texts[rows] for rows in order.split(max(1, most // length)))
        results = [run(batch, *self.framed(batch)) for batch in batches]
        return [
            torch.cat(parts)[order.argsort()] for parts in zip(*results, strict=True)
        ]

    @cached_property
    def predicts(self) -> bool:
        """Whether this is a causal model with its head, which predicts the next token."""
        if self.target.parts.causal:
            head = self.target.model.get_output_embeddings()
        else:
            head = None
        return isinstance(head, nn.Linear)

    @torch.no_grad()
    def read(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Run texts fast, and return their vectors (b, d) and log p (b, n) of each token.

        The model must have a head (`predicts`). A token with no token before it has log
        p NaN.
        """

        def run(batch: Texts, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            states = self._states(ids, mask)
            return self.directions(pool(self.exposure, states, mask)), self._log_p(
                states, batch
            )

        vectors, log_p = self._in_batches(texts, run)
        return vectors, log_p

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
        nothing = states.new_full(
            (len(states), max(0, 1 - first), states.shape[2]), torch.nan
        )
        rows = torch.cat([nothing, states[:, max(0, first - 1) :]], 1)[:, :count]
        return nn.functional.pad(
            rows, (0, 0, 0, count - rows.shape[1]), value=torch.nan
        )

    def _log_p(self, states: Tensor, texts: Texts) -> Tensor:
        """Return log p (b, n) of each token of texts, from the states before it."""
        states = self._before(states, texts.ids.shape[1])
        inside = texts.mask
        tokens = texts.ids[inside][:, None].split(_ANSWERS[self.device.type])
        pairs = zip(self._answers(states[inside]), tokens, strict=True)
        log_p = torch.full(texts.ids.shape, torch.nan, device=self.device)
        log_p[inside] = torch.cat(
            [answers.gather(1, some)[:, 0] for answers, some in pairs]
        )
        return log_p

    def gradient(
        self, texts: Texts, of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return numbers (b,) `of` what the model exposes, and the gradients (b, n, e) of each."""
        self.passes += len(texts)
        ids, mask = self.framed(texts)
        n = texts.ids.shape[1]
        first = len(self.before)
        with torch.enable_grad():
            embeddings = self.target.parts.tokens(ids).detach().requires_grad_()
            given = capture(
                self.target.model, self.exposure, embeddings=embeddings, mask=mask
            )
            numbers = of(given["values"])
            (slopes,) = torch.autograd.grad(numbers.sum(), embeddings)
        slopes = slopes[:, first : first + n]
        return numbers.detach(), nn.functional.pad(
            slopes, (0, 0, 0, n - slopes.shape[1])
        )


def matrix_half() -> torch.dtype | None:
    """Return the half precision that this CPU has matrix units for: 3 times as fast as float32."""
    if hasattr(torch.cpu, "get_capabilities"):
        known = torch.cpu.get_capabilities()
    else:
        known = {}
    return torch.bfloat16 if known.get("amx_bf16") else None


@dataclass(frozen=True, eq=False)
class Whitening:
    """An affine map to equal variance in all directions, with a mean (d,) and a map (d, d).

    With mean μ and covariance C = U diag(λ) Uᵀ over some texts, v becomes (v − μ) U
    diag(λ + ε)^-½. ε is a share of the largest λ, so that rounding does not count as
    much as the text.
    """

    mean: Tensor
    map: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Whitening:
        """Fit to vectors (b, d); if b < d, all other directions count alike."""
        mean = vectors.double().mean(0)
        off = vectors.double() - mean
        spread, axes = torch.linalg.eigh(off.T @ off / len(off))
        scale = (spread.clamp(min=0) + _ROUNDING * spread[-1].clamp(min=1e-30)).rsqrt()
        return cls(mean.to(vectors), (axes * scale).to(vectors))

    def __call__(self, vectors: Tensor) -> Tensor:
        return (vectors - self.mean) @ self.map
