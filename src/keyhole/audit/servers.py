"""A server of a language model: which routes are open, and what can be read of what they return.

Every route that answers without a key and returns states, log-probabilities or cache files is a
finding by itself; log-probabilities of the whole vocabulary give away the last layer besides
(last_layers.py). With the model's weights the audit goes on: texts are sent, and read back from
the states alone; the last state is computed from log-probabilities; and the text is sent as
vectors, where a server may take those (vector_prompts.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from keyhole.audit.check import Check, Checked
from keyhole.audit.last_layers import last_layer, reads
from keyhole.audit.texts import reading_of
from keyhole.audit.vector_prompts import takes_vectors
from keyhole.core import Finding, Skip, Status, Unsuccessful
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Readings
from keyhole.core.machine import largest_matrix
from keyhole.core.progress import Track
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure as Captured
from keyhole.models.capture import capture
from keyhole.models.loading import Loaded, head_of
from keyhole.oracle.completions import FORMS
from keyhole.oracle.probe import CACHE, LOGPROBS, STATES, VECTOR, Answered, Route, Server
from keyhole.recover import HiddenStates, Logits, recover_text
from keyhole.recover.attack import Target as Attacked
from keyhole.recover.embeddings.final_state import final_states
from keyhole.recover.files.contents import served_noise, with_served_noise
from keyhole.recover.leaks import Leak
from keyhole.recover.originals import Original
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.simulate import MAX_LENGTH
from keyhole.report import words

_RULES = {
    STATES: "KH-TEXT-HIDDEN-STATES", VECTOR: "KH-TEXT-EMBEDDING", CACHE: "KH-TEXT-KEYS-AND-VALUES",
    LOGPROBS: "KH-TEXT-LOG-PROBABILITIES",
}  # fmt: skip
_PROBE = "a secret"  # what routes are asked about before anything is known of them
_CLOSE = 1e-3  # of the state's length: what float32 and printing leave
_MANY = 384  # log-probabilities that a state needs at least, where its width is not known


@dataclass(frozen=True, eq=False)
class ServerTarget:
    """A server, the weights of its model where they are known, and texts to send."""

    name: str
    server: Server
    loaded: Loaded | None
    texts: Sequence[str]

    @property
    def identity(self) -> str:
        weights = "" if self.loaded is None else f"; {self.loaded.name} {self.loaded.identity}"
        return f"{self.server.url} {self.server.kind} {self.server.model}{weights}"

    @property
    def size(self) -> int:
        return 0 if self.loaded is None else largest_matrix(self.loaded.model)

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def checks(self, seed: int, *, against_defences: bool) -> list[Check]:  # noqa: ARG002
        return checks(self.name, self)


def checks(part: str, target: ServerTarget) -> list[Check]:
    """One for each route, and one for each thing that is read of what a route returns."""
    made: list[Check] = []
    server, loaded = target.server, target.loaded
    for route in server.routes:
        exposed = partial(Exposure, name=route.name, part=part)
        exposure = exposed(_RULES[route.gives], "route")
        made.append(Check(exposure, partial(_probe, exposure, server, route, loaded)))
        if reads(server, route):
            exposure = exposed("KH-WEIGHTS-LAST-LAYER")
            made.append(Check(exposure, partial(last_layer, exposure, server, route, _PROBE)))
        if loaded is not None and route.gives == STATES:
            exposure = exposed("KH-TEXT-HIDDEN-STATES", "served")
            run = partial(_texts, exposure, server, route, loaded, target.texts)
            made.append(Check(exposure, run))
        # OpenAI's own form names tokens by their text, which may be the same for several.
        if loaded is not None and route.gives == LOGPROBS and route.numbered:
            exposure = exposed("KH-TEXT-LOG-PROBABILITIES", "last-state")
            run = partial(_state, exposure, server, route, loaded, target.texts)
            made.append(Check(exposure, run))
    if loaded is not None and server.kind in FORMS:
        name = FORMS[server.kind].name(server.kind)
        exposure = Exposure("KH-WEIGHTS-VECTOR-PROMPTS", name=name, part=part)
        made.append(Check(exposure, partial(takes_vectors, exposure, server, loaded, _PROBE)))
    return made


def _probe(
    exposure: Exposure, server: Server, route: Route, loaded: Loaded | None, track: Track
) -> Checked:
    del track
    started = time.perf_counter()
    answered = server.try_route(route, _PROBE)
    status, reason = _verdict(server, route, answered, loaded)
    if status is None:
        skip = Skip(exposure, "probe", f"not given: {reason}", unchecked=answered.status == 0)
        return Checked(skips=(skip,))
    return _checked(exposure, route, "probe", status, reason, started, sought=route.gives)


def _checked(
    exposure: Exposure, route: Route, attack: str, status: Status, reason: str, started: float, *,
    error: float | None = None, queries: int = 1, **more: Any,
) -> Checked:  # fmt: skip
    """One finding about a route."""
    return Checked(
        (
            Finding(
                exposure=exposure, attack=attack, status=status, reason=reason,
                remedy=route.remedy, error=error, queries=queries,
                seconds=time.perf_counter() - started, **more,
            ),
        )
    )  # fmt: skip


def _verdict(
    server: Server, route: Route, answered: Answered, loaded: Loaded | None
) -> tuple[Status | None, str]:
    """What an answer without a key means; no status where the server has no such route."""
    content = answered.content
    if answered.shut:
        return Status.UNSOLVED, f"asks for a key ({answered.status})"
    if not answered.open:
        return None, answered.reason
    given = "answers without a key: "
    if route.gives == STATES:
        given += f"{len(content)} rows of {len(content[0])} numbers for {_PROBE!r}"
    elif route.gives == VECTOR:
        # What a vector gives away takes its encoder and texts to find out: audit/stores.py.
        given += (
            f"one vector of {len(content)} numbers: audit {server.url}{route.path} --known FILE"
        )
        return Status.NOT_APPLICABLE, given
    elif route.gives == LOGPROBS:
        given += f"{len(content):,} log-probabilities of the next token"
        needed = _MANY if loaded is None else anatomy(loaded.model).width + 1
        if len(content) < needed:
            return Status.NOT_IDENTIFIABLE, f"{given}, where a state needs {needed:,}"
    else:
        given += "prompts can be saved to a file, which holds their token ids in the clear"
    return Status.RECOVERED, given


def _texts(
    exposure: Exposure,
    server: Server,
    route: Route,
    loaded: Loaded,
    texts: Sequence[str],
    track: Track,
) -> Checked:
    """Texts sent, and read back from the states that came."""
    started = time.perf_counter()
    parts = anatomy(loaded.model)
    longest = min(MAX_LENGTH, parts.max_length)
    progress = track(words.exposure(exposure), len(texts))
    recoveries: list[TextRecovery] = []
    for number, text in enumerate(texts):
        answered = server.try_route(route, text, key=True)
        if not answered.open:
            return Checked(skips=(Skip(exposure, "none", f"not given: {answered.reason}"),))
        leak = HiddenStates(torch.tensor(answered.content), parts.layers)
        recoveries.append(_recovered(loaded, leak, served=route.eight_bits))
        progress(number + 1)
    originals = [Original.of(loaded.tokenizer, text, longest) for text in texts]
    readings = tuple(
        reading_of(loaded.tokenizer, original, recovery)
        for original, recovery in zip(originals, recoveries, strict=True)
    )
    cell = Readings("hidden", parts.layers, "as served", readings)
    status = Status.RECOVERED if cell.exact == len(readings) else recoveries[0].status
    if status is Status.RECOVERED and cell.exact < len(readings):
        status = Status.INEXACT
    reason = f"{cell.exact} of {len(readings)} texts exact and verified; {recoveries[0].reason}"
    return _checked(
        exposure, route, recoveries[0].method, status, reason, started,
        queries=len(readings), known=cell.known, sought="text", texts=(cell,),
    )  # fmt: skip


def _recovered(loaded: Loaded, leak: Leak, *, served: bool) -> TextRecovery:
    if served:
        (leak,) = with_served_noise(Attacked.of(loaded.model, loaded.tokenizer), [leak])
    return recover_text(loaded.model, loaded.tokenizer, leak)


def _state(
    exposure: Exposure,
    server: Server,
    route: Route,
    loaded: Loaded,
    texts: Sequence[str],
    track: Track,
) -> Checked:
    """The last state behind log-probabilities, beside the model's own for the same text."""
    del track
    started = time.perf_counter()
    if head_of(loaded.model) != "causal":
        return Checked(skips=(Skip(exposure, "none", "the weights have no head for next tokens"),))
    answered, text = Answered(), ""
    for text in texts:  # after some texts comes half a character, of which llama.cpp says nothing
        answered = server.try_route(route, text, key=True)
        if answered.open:
            break
    if not answered.open:
        return Checked(skips=(Skip(exposure, "none", f"not given: {answered.reason}"),))
    status, reason, error = _compared(loaded, text, answered.content, route)
    return _checked(
        exposure, route, "final_states", status, reason, started, error=error,
        sought="last state",
    )  # fmt: skip


def _compared(
    loaded: Loaded, text: str, logprobs: dict[int, float], route: Route
) -> tuple[Status, str, float | None]:
    """How far the state by least squares is from the model's own, relative to its length."""
    model: Any = loaded.model
    values = torch.full((1, len(anatomy(model).table)), torch.nan)
    for token, value in logprobs.items():
        if not 0 <= token < values.shape[1]:
            return Status.MISMATCH, f"token {token} is none of the model's", None
        values[0, token] = value
    try:
        state = final_states(model, Logits(values, log_probabilities=True))[0]
    except Unsuccessful as end:
        return end.status, end.reason, None
    target = Attacked.of(model, loaded.tokenizer)
    top = Captured("hidden", target.parts.layers)
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]], device=target.parts.device)
    with torch.no_grad():
        own = capture(model, top, ids=ids)["values"][0, -1].double().cpu()
    error = float((state - own).norm() / own.norm())
    leak = HiddenStates(own.float()[None], target.parts.layers)
    spread = float(own.square().mean().sqrt())
    allowed = _CLOSE + (served_noise(target, leak) / spread if route.eight_bits else 0.0)
    reason = (
        f"the last state from {len(logprobs):,} log-probabilities, {error:.1e} of its length from "
        f"the model's own, where the server's arithmetic allows {allowed:.1e}"
    )
    return (Status.RECOVERED if error <= allowed else Status.MISMATCH), reason, error
