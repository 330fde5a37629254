"""S-Attend: *Unveiling Vulnerability of Self-Attention*, arXiv 2402.16470.

    min_θ  E_M CE(f_θ(x; M), y)        M_u ~ Bernoulli(p)   for every unit u

In training, units of attention are dropped before the softmax, with a new draw in each
forward pass. At inference nothing is dropped, and the model computes exactly what it
would without S-Attend.

- `unit`, as in the paper: an independent draw for each (layer, head, query, key).
- `token`, as in its code: a draw for each key of each text, the same for all layers, heads and
  queries. Padding and special tokens are spared, [UNK] too. They are found by the
  tokenizer's special ids, and by `special_tokens_mask` among the inputs, which does not
  mark [UNK]. The decoder's own tokens are drawn if `decoder_input_ids` are given.

A row whose keys are all drawn is left unchanged (keyhole.models.masking). With
`emptied` its query gets zero instead, which smoothing over masks needs
(harden/smoothing.py); then the rate may be 1, which is no attention at all. Draws
depend only on the seed, the process's rank, the training step and the site. So a
resumed run repeats its draws, and gradient checkpointing recomputes the same mask.

In a training script, use one of

    with SAttend(0.2).apply(model): …
    Trainer(…, callbacks=[SAttend(0.2).callback()])
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import InputError, expect_among
from keyhole.harden.defences.defence import SPECIAL, Batch, draw, passes
from keyhole.models.loading import transformers
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True)
class SAttend:
    """Drop attention with probability `rate`, by unit or by key token."""

    rate: float = 0.2
    mode: Literal["unit", "token"] = "unit"
    seed: int = 0
    emptied: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1 and not (self.emptied and self.rate == 1):
            raise InputError(f"rate must be at least 0 and below 1, got {self.rate}")
        expect_among("mode", self.mode, ("unit", "token"))

    @contextmanager
    def apply(self, model: nn.Module, tokenizer: Any = None) -> Generator[Drops]:
        """Drop attention in forward passes in train mode, until the context ends.

        Token mode needs the tokenizer, unless the inputs mark the special tokens.
        """
        drops = Drops(self, model, tuple(getattr(tokenizer, "all_special_ids", ())))
        with rewriting(model, drops):
            yield drops

    def callback(self) -> Any:
        """Return a transformers `TrainerCallback` that applies this during training."""
        return _callback(self)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        scores = passes(model, batch, stream)
        # The context includes the backward pass, where gradient checkpointing runs
        # layers again.
        with replace(self, seed=draw(stream)).apply(model) as drops:
            drops.special = batch.get(SPECIAL)
            yield cross_entropy(scores(), labels)


class Drops(Untouched):
    """The draws of one training run; a trainer may set the current `step`."""

    def __init__(
        self,
        method: SAttend,
        model: nn.Module,
        ids: tuple[int, ...],
    ) -> None:
        self.method = method
        self.empties = method.emptied
        self.model = model
        self.ids = ids
        # used if the inputs have no special_tokens_mask
        self.special: Tensor | None = None
        self.step = 0
        self._passes = 0
        self._dropped: dict[str, Tensor] = {}

    def begin(self, inputs: Mapping[str, Any]) -> bool:
        if not self.model.training or self.method.rate == 0:
            return False
        self._passes += 1
        if self.method.mode == "token":
            self._dropped = self._tokens(inputs)
        return True

    def at_step(self, step: int) -> None:
        """Begin a step of the optimizer; passes are counted within it."""
        self.step = step
        self._passes = 0

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        if self.method.mode == "unit":
            return self._draw(shape, str(site.index))
        dropped = self._dropped.get(self._side(site))
        if dropped is None:
            return None
        if dropped.shape != (shape[0], shape[-1]):
            raise InputError(
                f"expected {shape[0]} × {shape[-1]} tokens at {site.name} in token mode, "
                f"got inputs of {tuple(dropped.shape)}"
            )
        return dropped[:, None, None, :]

    def _side(self, site: Site) -> str:
        """Return which inputs the keys of a site come from."""
        pair = bool(getattr(self.model.config, "is_encoder_decoder", False))
        decoder = pair and site.kind == "self" and "encoder" not in site.name.split(".")
        return "decoder_input_ids" if decoder else "input_ids"

    def _tokens(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Draw the keys that each text loses, for the encoder and the decoder."""
        if not isinstance(inputs.get("input_ids"), Tensor):
            raise InputError(
                f"token mode needs input_ids: the inputs are {', '.join(inputs)}"
            )
        dropped: dict[str, Tensor] = {}
        for side in ("input_ids", "decoder_input_ids"):
            ids = inputs.get(side)
            if isinstance(ids, Tensor):
                special = self._special(ids, inputs if side == "input_ids" else {})
                dropped[side] = self._draw(special.shape, side) & ~special
        return dropped

    def _special(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        given = inputs.get(SPECIAL, self.special)
        known = torch.isin(ids, ids.new_tensor(self.ids))
        if isinstance(given, Tensor) and given.shape == ids.shape:
            known = known | given.bool()
        elif not self.ids:
            raise InputError(
                "token mode needs a tokenizer, as in SAttend(…).apply(model, tokenizer), or "
                "special_tokens_mask among the inputs"
            )
        return known.flatten(0, -2)

    def _draw(self, shape: torch.Size, where: str) -> Tensor:
        device = next(self.model.parameters()).device
        words = f"{self.method.seed} {_rank()} {self.step} {self._passes} {where}"
        digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
        own = torch.Generator(device).manual_seed(int.from_bytes(digest))
        drawn = torch.empty(shape, dtype=torch.bool, device=device)
        return drawn.bernoulli_(self.method.rate, generator=own)


def _rank() -> int:
    """Return the rank of this process, because parallel processes must draw differently."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else 0


def _callback(method: SAttend) -> Any:
    library = transformers()

    # The library is imported on demand, so its types are unknown.
    class Callback(library.TrainerCallback):  # pyright: ignore[reportUntypedBaseClass]
        """Enters the context when training begins and leaves it when training ends.

        After an error the context is left when the next training begins. Until then
        evaluation is not affected.
        """

        def __init__(self) -> None:
            self.stack = ExitStack()
            self.drops: Drops | None = None

        def on_train_begin(
            self,
            args: Any,
            state: Any,
            control: Any,
            **given: Any,
        ) -> None:
            del state, control
            if args.n_gpu > 1:
                raise InputError(
                    f"start one process for each of {args.n_gpu} GPUs: use accelerate launch"
                )
            self.stack.close()
            context = method.apply(given["model"], given.get("processing_class"))
            self.drops = self.stack.enter_context(context)

        def on_step_begin(
            self,
            args: Any,
            state: Any,
            control: Any,
            **given: Any,
        ) -> None:
            del args, control, given
            cast("Drops", self.drops).at_step(state.global_step)

        def on_train_end(
            self,
            args: Any,
            state: Any,
            control: Any,
            **given: Any,
        ) -> None:
            del args, state, control, given
            self.stack.close()

    return Callback()
