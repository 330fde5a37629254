"""Every token of the vocabulary at the end of a short text: how a last state begins to be read.

The last state of a causal model says most of the token that it stands on, and of that nearly the
same whatever came before: so of all tokens, each run once at the end of some beginning, the right
one gives the nearest state. A token alone is another matter, because models give the first token of
a text a state of its own kind: it finds prompts of one token, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.embedding.scoring import Encoder, Texts

Before = tuple[tuple[int, int], ...]  # tokens before the last, from and to, of each run
_BEFORE: dict[str, Before] = {"cuda": ((0, 0), (1, 3), (4, 8)), "cpu": ((0, 0),)}


@dataclass(frozen=True, eq=False)
class Endings:
    """k runs over V tokens: `texts` of k·V, one run after the other, and `vectors` (k, V, d)."""

    texts: Texts
    vectors: Tensor

    @classmethod
    def of(
        cls, encoder: Encoder, lines: Texts, seed: int = 0, before: Before | None = None
    ) -> Endings:
        """After beginnings of lines by chance, as long as `before` says for each run."""
        device, size, width = encoder.device, len(encoder.table), lines.ids.shape[1]
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.arange(size, device=device)
        parts: list[Texts] = []
        for least, most in before or _BEFORE[device.type]:
            rows = torch.randint(len(lines), (size,), generator=generator, device=device)
            count = torch.randint(least, most + 1, (size,), generator=generator, device=device)
            count = torch.minimum(count, lines.lengths[rows]).clamp(max=width - 1)
            ids = lines.ids[rows].scatter(1, count[:, None], tokens[:, None])
            parts.append(Texts(ids, count + 1).clean())
        texts = Texts.cat(parts)
        vectors = encoder.vectors(texts, fast=True)
        return cls(texts, vectors.view(len(parts), size, -1))

    @property
    def of_tokens(self) -> Tensor:
        """What the vectors say of each token (V, d): their mean, alone left out where it can be."""
        return self.vectors[1 if len(self.vectors) > 1 else 0 :].mean(0)

    def nearest(
        self, goals: Tensor, barred: Tensor, count: int, longest: int
    ) -> tuple[Texts, Tensor]:
        """Texts that end in the nearest tokens to each vector (v, d), and its number."""
        best = torch.stack([goals @ run.T for run in self.vectors]).max(0)
        cosines = best.values.index_fill(1, barred, -2.0)
        tokens = cosines.topk(min(count, cosines.shape[1]), dim=1).indices
        places = best.indices.gather(1, tokens) * cosines.shape[1] + tokens
        texts = self.texts[places.flatten()]
        vector = torch.arange(len(goals), device=goals.device).repeat_interleave(places.shape[1])
        fits = texts.lengths <= longest
        return texts[fits].padded(longest), vector[fits]
