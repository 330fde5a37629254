"""Could another text have given the same logits? Texts one edit away are run, of any length.

Logits are one vector for a whole text, and a token more or less is a rival like any other where its
length is not known. One such rival always fits: a model with rotary positions and no token that
begins every text gives the same for a token alone and for that token repeated, because attention
over equal values is that value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Tokens, Vectors, alternatives_to
from keyhole.recover.leaks import Logits
from keyhole.recover.rivals import exposed_rows

_TOKENS = 2048  # in one pass


def other_text(
    target: Target, leak: Logits, ids: Sequence[int], misfits: Callable[[Tensor], Tensor],
    enough: float,
) -> tuple[Tokens | None, int]:  # fmt: skip
    """The text one edit away that fits best, if the odds against it are not `enough`; passes."""
    exposure = Exposure("pooled", pooling="last", steps=leak.exposure.steps)
    vectors = Vectors(target, exposure, ids)
    text = vectors.inside(ids)
    rivals = alternatives_to(vectors, text, vectors([text])[0], leak.length is not None).texts

    def misfit(texts: Sequence[Tokens]) -> Tensor:
        framed = [[*vectors.before, *each, *vectors.after] for each in texts]
        rows = torch.tensor(framed, device=target.parts.device)
        parts = rows.split(max(1, _TOKENS // rows.shape[1]))
        return torch.cat([misfits(exposed_rows(target, leak, part)).sum(-1) for part in parts])

    own = float(misfit([text]))
    best: tuple[float, Tokens | None] = (enough, None)
    for _, alike in groupby(sorted(rivals, key=len), key=len):
        texts = list(alike)
        worse, place = (misfit(texts) - own).min(0)
        if float(worse) <= best[0]:
            best = (float(worse), texts[int(place)])
    return best[1], vectors.passes + len(rivals) + 1
