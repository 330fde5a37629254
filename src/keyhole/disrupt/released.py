"""HackAttend's released program, mask for mask: github.com/liongkj/HackAttend, commit 98a1d52.

greedy.py is the attack as the paper describes it; this module is what the released
program computes. The program attacks one text (C = 1) or one question of C choices at a
time, padded to S = 128 positions, with n tokens each. For every layer it writes a mask
of zeros and ones, which replaces the padding mask.

- **Layers** are ranked with all keys of the layer masked, which leaves uniform attention over all S
  positions. Layers without which the answer is wrong come first; the others follow by
  increasing confidence in the predicted class. **Heads** of a layer are ranked by that
  confidence alone, with the head's output at zero. Of the C·H sequences of that query,
  sequence r loses head r mod H, so the choices of a question lose different heads.
- **Units** score −∂loss/∂a, or 0 if they are spared. The k = max(1, ⌊share·(Σ(n−1))²/C⌋) best are
  cut. Units of negative score rank after the spared ones, so none of them is cut. If
  all units of a head score 0 (in the last layer only [CLS] is read), they are ranked by
  attention instead.
- **A text**: the first row, the first column and padding are spared. In an attacked head [CLS] does
  not attend to [CLS] either, which is not counted.
- **Multiple choice**: masks depend on the query alone, so padded keys are open in every layer.
  Padded queries see nothing, which amounts to uniform attention; in the other heads of
  an attacked layer they see key 0. The units of each choice are cut in all choices. In
  the other heads of an attacked layer, [CLS] of the first choice sees the first Σn
  keys, and [CLS] of any other choice only itself.

`units=False` is the control: the same masks without the cut units. The program itself
fails unless there are as many heads as layers, because it writes a mask of heads over
the wrong axis. This module works for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.data import Batch
from keyhole.disrupt.disruption import Disruption
from keyhole.disrupt.hack_attend import attack, counts
from keyhole.disrupt.masked_queries import MaskedQueries
from keyhole.disrupt.tasks import Question, ask
from keyhole.disrupt.units import Units
from keyhole.models.anatomy import positions as max_positions
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True)
class ReleasedProgram:
    """For BERT-like classifiers and multiple choice; texts are padded to `positions` on the right.

    In an outcome, `steps` is the program's number of queries. `cut` holds all masked
    units between tokens, also those that the program does not count. `perturbation`
    covers the chosen units only.
    """

    share: float = 0.01
    units: bool = True
    positions: int = 128
    batch: int = 64

    def __post_init__(self) -> None:
        expect_number("share", self.share, least=0, most=1)
        expect_count("positions", self.positions, 1)
        expect_count("batch", self.batch, 1)

    @property
    def words(self) -> str:
        if self.units:
            what = f"{100 * self.share:g}% of each head's attention"
        else:
            what = "no unit"
        return f"{what} cut by the released program"

    @property
    def control(self) -> bool:
        return not self.units

    def __call__(
        self,
        model: Any,
        batch: Batch,
        labels: Tensor | None = None,
        *,
        ids: Sequence[str] = (),
    ) -> Disruption:
        question = ask(model, _padded(model, batch, self.positions), labels)
        if question.task not in ("classification", "choice"):
            raise InputError(
                "the released program attacks classifiers and multiple choice only"
            )
        return attack(self, model, question, ids, "padding", self.batch, 1, self._found)

    def _found(
        self,
        model: Any,
        question: Question,
        units: Units,
    ) -> Iterator[dict[str, Any]]:
        yield _Program(self, model, question, units).attack()


@dataclass(eq=False)
class _Masks(Untouched):
    """Attention under the program's masks: `closed` returns that of a layer, or None for no mask.

    A row in which all keys are closed is uniform, because the program adds the same
    large negative number to all its scores.
    """

    closed: Callable[[int], Tensor | None]
    empty: Tensor | None = None

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        closed = self.closed(site.index)
        self.empty = None
        if closed is None:
            return None
        self.empty = closed.all(-1, keepdim=True).expand(*shape[:3], 1)
        return closed & ~self.empty

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        del site, shape
        return None if self.empty is None else (~self.empty).double()

    def bump(self, site: Site, shape: torch.Size) -> Tensor | None:
        del site
        return None if self.empty is None else self.empty.double() / shape[-1]


@dataclass(eq=False)
class _Gated(Untouched):
    """The outputs of one layer's heads, times `gates` (sequences, heads)."""

    layer: int
    gates: Tensor

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        del shape
        return self.gates[:, :, None, None] if site.index == self.layer else None


@dataclass(eq=False)
class _Program:
    """The program on one text or question; masks are booleans (choices, heads, queries, keys)."""

    method: ReleasedProgram
    model: Any
    question: Question
    units: Units

    def __post_init__(self) -> None:
        question = self.question
        self.queries = MaskedQueries(
            self.model, question, self.units, self.method.batch
        )
        self.asked = 0
        mask = question.inputs["attention_mask"]
        real = mask.flatten(0, -2) != 0
        choice = question.task == "choice"
        inner = real.clone()
        inner[:, 0] = False
        self.whole, self.inner = (_square(side, choice) for side in (real, inner))
        self.first = self.whole & ~self.inner  # those of [CLS], open in attacked heads
        self.others = self.inner.clone()  # open in the other heads of an attacked layer
        self.others[:, : int(real.sum()), 0] = True
        self.others[0, 0, : int(real.sum())] = True
        if not choice:
            self.first[:, 0, 0] = False
        # in float32, like the program
        self.count = int(inner.sum() ** 2 * self.method.share / len(inner)) or 1
        self.layers = len(self.units.places)
        self.heads = self.units.places[0].shape[1]
        self.open = replace(
            question,
            inputs={**question.inputs, "attention_mask": torch.ones_like(mask)},
        )

    def attack(self) -> dict[str, Any]:
        """Return the fields of `Outcome` that the program's masks give."""
        self.chosen = self._chosen()
        attacked = torch.zeros(
            self.layers, self.heads, dtype=torch.bool, device=self.inner.device
        )
        steps = 0
        for layer in self._layer_order():
            masks: list[Tensor] = []
            for head in self._head_order(layer):
                attacked[layer, head] = True
                masks.append(attacked.clone())
            logits = self._ask(
                self.open, len(masks), lambda part, m=masks: self._masks(m[part])
            )
            hits = self.question.part(_same(len(masks), attacked)).flipped(logits)
            if hits.any():
                last = int(hits.int().argmax())
                return self._judged(masks[last], steps + last + 1)
            steps += len(masks)
        return self._judged(attacked, steps)

    def _judged(self, attacked: Tensor, steps: int) -> dict[str, Any]:
        """Return the outcome of another forward pass with the last masks."""
        logits = self._ask(self.open, 1, lambda _: self._masks([attacked]))
        opened = [
            self._opened(layer, heads[None]) for layer, heads in enumerate(attacked)
        ]
        closed = ~torch.cat([each.flatten() for each in opened])
        masked = closed[None] & self.units.exists
        found = counts(self.units, masked)
        hit = attacked.repeat(1, len(self.inner)).flatten()
        chosen = torch.cat([mask.flatten() for mask in self.chosen]) & masked[0]
        of_heads = (self.units.head_units[0] * hit).sum()
        found["perturbation"] = chosen.sum() / of_heads.clamp(min=1)
        return {
            **{name: value.item() for name, value in found.items()},
            "flipped": bool(self.question.flipped(logits)),
            "after": tuple(self.question.predicted(logits)[0].tolist()),
            "confidence_after": float(self.question.confidence(logits)),
            "queries": self.asked + int(self.queries.asked.sum()),
            "steps": steps,
            "cut": self.units.named(masked[0]),
        }

    def _chosen(self) -> list[Tensor]:
        """The units that each head loses when it is attacked, in every choice."""
        nothing = torch.zeros_like(self.units.free)
        a, g = self.queries.slopes(nothing, _same(1, nothing), "cross-entropy")
        masks: list[Tensor] = []
        for place in self.units.places:
            slope, attention = (
                (self.units.at(value, place)[0] * self.inner[:, None]).flatten(2)
                for value in (-g, a)
            )
            flat = (slope == 0).all(-1).all(0)[:, None]
            score = torch.where(flat, attention, slope)
            most = min(self.count, slope.shape[-1])
            best = score.topk(most).indices
            mask = torch.zeros_like(slope, dtype=torch.bool).scatter(
                -1, best, self.method.units
            )
            everywhere = mask.any(0, keepdim=True).expand_as(mask).reshape(place.shape)
            masks.append(everywhere & self.inner[:, None])
        return masks

    def _layer_order(self) -> list[int]:
        every = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.inner.device)

        def ask_without(layer: int) -> Tensor:
            rewrite = _Masks(lambda index: every if index == layer else None)
            return self._ask(self.question, 1, lambda _: rewrite)

        logits = torch.cat([ask_without(layer) for layer in range(self.layers)])
        right = self.question.part(_same(self.layers, logits)).right(logits)
        sure = _confidence(logits)
        return sorted(
            range(self.layers), key=lambda i: (bool(right[i]), float(sure[i]))
        )

    def _head_order(self, layer: int) -> list[int]:
        choices = len(self.inner)
        keep = 1 - torch.eye(self.heads, dtype=torch.float64, device=self.inner.device)
        gates = keep.repeat(choices, 1)

        def rewrite(part: slice) -> Untouched:
            return _Gated(layer, gates[part.start * choices : part.stop * choices])

        sure = _confidence(self._ask(self.question, self.heads, rewrite))
        return sorted(range(self.heads), key=lambda i: float(sure[i]))

    def _ask(
        self,
        question: Question,
        count: int,
        rewrite: Callable[[slice], Untouched],
    ) -> Tensor:
        """Ask the same example `count` times, each time with its own rewrite."""
        size = max(1, self.method.batch // question.rows)
        logits: list[Tensor] = []
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            self.asked += part.stop - part.start
            with torch.no_grad(), rewriting(self.model, rewrite(part)):
                same = _same(part.stop - part.start, question.labels)
                logits.append(question.part(same).logits(self.model))
        return torch.cat(logits)

    def _masks(self, attacked: list[Tensor]) -> _Masks:
        """The masks of several steps; each step attacks these heads (layers, heads)."""
        heads = torch.stack(attacked)
        return _Masks(lambda index: ~self._opened(index, heads[:, index]))

    def _opened(self, layer: int, attacked: Tensor) -> Tensor:
        """The open units of one layer, (steps·choices, heads, queries, keys), at several steps."""
        lost = (self.inner[:, None] & ~self.chosen[layer]) | self.first[:, None]
        heads = attacked[:, None, :, None, None]
        opened = torch.where(heads, lost, self.others[:, None])
        any_head = heads.any(2, keepdim=True)
        return torch.where(any_head, opened, self.whole[:, None]).flatten(0, 1)


def _square(side: Tensor, choice: bool) -> Tensor:
    """Select units by their query and key token; in multiple choice by the query token alone."""
    return side[:, :, None] & (torch.ones_like(side) if choice else side)[:, None, :]


def _same(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, dtype=torch.long, device=like.device)


def _confidence(logits: Tensor) -> Tensor:
    """The confidence in the predicted class."""
    return logits[:, 0].softmax(-1).amax(-1)


def _padded(
    model: Any,
    batch: Batch,
    positions: int,
) -> Batch:
    """Pad a batch to `positions`, or to the model's maximum length; keep it if it is longer."""
    if "attention_mask" not in batch:
        batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    most = min(positions, max_positions(model) or positions)
    more = max(0, most - batch["input_ids"].shape[-1])
    fill = {"input_ids": model.config.pad_token_id or 0, "special_tokens_mask": 1}
    return {
        name: torch.nn.functional.pad(value, (0, more), value=fill.get(name, 0))
        for name, value in batch.items()
    }
