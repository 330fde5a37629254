"""S-Attend: *Unveiling Vulnerability of Self-Attention*, arXiv 2402.16470.

    min_θ  E_M CE(f_θ(x; M), y)        M_u ~ Bernoulli(p)   for every unit u

In training, units of attention are dropped before the softmax, anew in each forward pass; at
inference nothing is, and the model runs as if it had never been touched, bit for bit.

- `unit`, as the paper writes: independent for each (layer, head, query, key).
- `token`, as its code does: one draw for each key of each text, the same for all layers, heads and
  queries; special tokens ([UNK] too) and padding are spared. Where they stand is read from
  `input_ids` with the tokenizer's special ids, and from `special_tokens_mask` among the inputs,
  which does not mark [UNK].
  Encoder–decoder models: the decoder's own tokens are drawn if `decoder_input_ids` are given.

A row whose every key was drawn is left as it was (see keyhole.models.masking); with `emptied` its
query gets nothing, as smoothing over masks wants it (harden/smoothing.py), up to a rate of 1, where
there is no attention at all. Draws depend on the seed, the process's rank, the training step and
the site alone, so a run that is resumed draws what it would have drawn, and gradient checkpointing
finds the same mask again.

In anyone's script, one of

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

from keyhole.core.errors import InputError
from keyhole.harden.defences.defence import (
    SPECIAL,
    Batch,
    answer,
    cross_entropy,
    draw,
)
from keyhole.models.loading import transformers
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True)
class SAttend:
    """Drop attention with probability `rate`, each unit alone or each key token at once."""

    rate: float = 0.2
    mode: Literal["unit", "token"] = "unit"
    seed: int = 0
    emptied: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1 and not (self.emptied and self.rate == 1):
            raise InputError(f"rate must be at least 0 and below 1, got {self.rate}")
        if self.mode not in ("unit", "token"):
            raise InputError(f"mode must be unit or token, got {self.mode}")

    @contextmanager
    def apply(self, model: nn.Module, tokenizer: Any = None) -> Generator[Drops]:
        """While the context lasts, forward passes in train mode drop; others are untouched.

        The tokenizer says which ids are special; token mode needs it where the inputs do not.
        """
        ids = () if tokenizer is None else tuple(getattr(tokenizer, "all_special_ids", ()))
        drops = Drops(self, model, ids)
        with rewriting(model, drops):
            yield drops

    def callback(self) -> Any:
        """A transformers `TrainerCallback`: on from the beginning of training to its end."""
        return _callback(self)

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        seed = draw(stream)
        # Inside the context: gradient checkpointing runs layers again in the backward pass.
        with replace(self, seed=draw(stream)).apply(model) as drops:
            drops.special = batch.get(SPECIAL)
            yield cross_entropy(answer(model, batch, seed), labels)


class Drops(Untouched):
    """The draws of one training run; `step` is its step, where a trainer sets it."""

    def __init__(self, method: SAttend, model: nn.Module, ids: tuple[int, ...]) -> None:
        self.method = method
        self.empties = method.emptied
        self.model = model
        self.ids = ids
        self.special: Tensor | None = None  # for callers that know, instead of the inputs
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
        """The optimizer's step begins; passes are counted inside it."""
        self.step, self._passes = step, 0

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
        """Whose tokens the keys are."""
        pair = bool(getattr(self.model.config, "is_encoder_decoder", False))
        decoder = pair and site.kind == "self" and "encoder" not in site.name.split(".")
        return "decoder_input_ids" if decoder else "input_ids"

    def _tokens(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Which keys each text loses, for the tokens on either side of the model."""
        if not isinstance(inputs.get("input_ids"), Tensor):
            raise InputError(f"token mode needs input_ids: the inputs are {', '.join(inputs)}")
        dropped: dict[str, Tensor] = {}
        for side in ("input_ids", "decoder_input_ids"):
            ids = inputs.get(side)
            if isinstance(ids, Tensor):
                special = self._special(ids, inputs if side == "input_ids" else {})
                dropped[side] = self._draw(special.shape, side) & ~special
        return dropped

    def _special(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        given = inputs.get(SPECIAL, self.special)
        known = torch.isin(ids, torch.tensor(self.ids, dtype=ids.dtype, device=ids.device))
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
    """Processes that train together must not draw the same."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else 0


def _callback(method: SAttend) -> Any:
    library = transformers()

    # The library loads when it is needed, so its types are not known here.
    class Callback(library.TrainerCallback):  # pyright: ignore[reportUntypedBaseClass]
        """Enters at the beginning of training and leaves at its end.

        A run that an error ends is left at the beginning of the next one; till then the model is
        untouched in evaluation.
        """

        def __init__(self) -> None:
            self.stack = ExitStack()
            self.drops: Drops | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            del state, control
            if args.n_gpu > 1:
                raise InputError(
                    f"start one process for each of {args.n_gpu} GPUs: use accelerate launch"
                )
            self.stack.close()
            context = method.apply(given["model"], given.get("processing_class"))
            self.drops = self.stack.enter_context(context)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            del args, control, given
            cast("Drops", self.drops).at_step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            del args, state, control, given
            self.stack.close()

    return Callback()
