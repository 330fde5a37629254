"""Checks of servers: which routes are open, and what can be read from their answers?

A server of a language model is a `ServerTarget`. Every route that returns states,
vectors, log-probabilities or cache files without a key is a finding, even if nothing
was read. Answers with the log-probabilities of the whole vocabulary also give away the
last layer. With the model's weights, the audit sends texts and reads them back from the
states, computes the last state from log-probabilities, and tests whether the server
takes vectors as a prompt.

An endpoint of the Open Inference Protocol that takes texts is an `AnswersTarget`. Each
of its outputs is classified, because attacks are known for some kinds of outputs and
not for others.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.audit.check import (
    Check,
    Checked,
    Part,
    joined,
    one_finding,
    one_skip,
    skipped_check,
)
from keyhole.audit.options import AuditOptions
from keyhole.audit.texts import originals_of, readings_of, unread, verdict
from keyhole.core import Skip, Status, Unsuccessful
from keyhole.core.endpoint import EndpointOptions, without_password
from keyhole.core.exposure import Exposure, is_chosen
from keyhole.core.finding import Readings
from keyhole.core.journal import digest
from keyhole.core.progress import Track
from keyhole.extract.output_layer import OutputLayer
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import ARITHMETICS, EIGHT_BITS, capture
from keyhole.models.capture import Exposure as Captured
from keyhole.models.loading import Loaded, head_of
from keyhole.oracle.completions import ROUTES as COMPLETIONS
from keyhole.oracle.completions import Completions
from keyhole.oracle.http import Refused
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import FLOATS, Output, TextEndpoint
from keyhole.oracle.probe import (
    CACHE,
    LOGPROBS,
    STATES,
    VECTOR,
    Answered,
    Route,
    Server,
)
from keyhole.oracle.protocol import Counted, Oracle, OracleError
from keyhole.oracle.vector_prompts import FORMS, VectorPrompts
from keyhole.recover import HiddenStates, Logits, recover_text
from keyhole.recover.attack import Target as Attacked
from keyhole.recover.embeddings.final_state import final_states
from keyhole.recover.files.contents import as_served, served_noise
from keyhole.recover.leaks import Leak
from keyhole.recover.recovery import TextRecovery
from keyhole.report import words

_RULES = {
    STATES: "KH-TEXT-HIDDEN-STATES",
    VECTOR: "KH-TEXT-EMBEDDING",
    CACHE: "KH-TEXT-KEYS-AND-VALUES",
    LOGPROBS: "KH-TEXT-LOG-PROBABILITIES",
}
# Texts to try a route with. If the next token would be half a character, llama.cpp
# gives no log-probabilities, and the next text is tried.
_PROBES = (
    "a secret",
    "a letter",
    "a name",
    "a number",
    "a word",
    "the end",
    "the door",
    "no",
)
_TOLERANCE = 1e-3  # of the state's length: rounding by float32 and by printing
# Times as many chosen tokens as a state needs, so that rounding averages out.
_SURPLUS = 2
_NO_HEAD = "the weights have no head for next tokens"
_FAULT = 500  # the status of a server's own fault
# That a state needs, if its width is unknown: small models have this width.
_MIN_LOGPROBS = 384


@dataclass(frozen=True, eq=False)
class ServerTarget(Part):
    """A server of a language model, texts to send, and the model's weights if they are known.

    - `budget`: how many queries an expensive attack may make.
    - `only`: the exposures to check; naming an expensive attack here allows it as well.
    - `ledger`: the file that keeps answers to the attack on the last layer.
    """

    name: str
    server: Server
    loaded: Loaded | None
    texts: Sequence[str]
    probe_only: bool = False
    budget: int | None = None
    only: tuple[str, ...] = ()
    ledger: str | Path | None = None
    observed = True

    @property
    def settings(self) -> dict[str, Any]:
        return {"texts": digest(list(self.texts)), "queries": self._allowed()}

    @property
    def identity(self) -> str:
        model = Path(self.server.model).name  # llama.cpp names a file
        identity = f"{self.server.url} {self.server.kind} {model}"
        return _with_weights(identity, self.loaded)

    def checks(self, options: AuditOptions) -> list[Check]:  # noqa: ARG002
        """Return a check of each route, and one for each attack on what a route returns."""
        checks: list[Check] = []
        server = self.server
        loaded = self.loaded

        def add(
            rule: str,
            variant: str,
            name: str,
            check: Callable[..., Checked],
            *on: Any,
        ) -> None:
            exposure = Exposure(rule, variant, name=name)
            checks.append(Check(exposure, partial(check, *on, exposure), weight=1))

        for route in server.routes:
            rule = _RULES[route.gives]
            add(rule, "route", route.name, self._probe, route)
            if self.probe_only:
                continue
            if route.numbered and route.path in COMPLETIONS:
                checks.append(self._last_layer_check(route))
            if loaded is None:
                continue
            if route.gives == STATES:
                add(rule, "served", route.name, self._texts, loaded, route)
            # OpenAI's own form names tokens by their text, which may be the same for
            # several.
            if route.gives == LOGPROBS and route.numbered:
                add(rule, "last-state", route.name, self._state, loaded, route)
        if loaded is not None and server.kind in FORMS and not self.probe_only:
            name = FORMS[server.kind].name(server.kind)
            add("KH-WEIGHTS-VECTOR-PROMPTS", "", name, takes_vectors, server, loaded)
        return checks

    def _allowed(self) -> int | None:
        """Return how many queries an expensive attack may make; None if none is chosen."""
        if self.only and not self.budget:
            return QUERIES
        return self.budget

    def _last_layer_check(self, route: Route) -> Check:
        """Return the attack on the last layer; a skip unless it is chosen by a rule or a budget."""
        exposure = Exposure("KH-WEIGHTS-LAST-LAYER", name=route.name)
        allowed = self._allowed()
        if not allowed or not is_chosen(exposure, self.only):
            reason = (
                f"it takes about {QUERIES:,} questions to the server: --budget {QUERIES} or "
                "--only KH-WEIGHTS-LAST-LAYER runs it"
            )
            return skipped_check(Skip(exposure, "OutputLayer", reason))
        run = partial(last_layer, self.server, route, allowed, self.ledger, exposure)
        return Check(exposure, run, queries=allowed)

    def _probe(
        self,
        route: Route,
        exposure: Exposure,
        _: Track,
    ) -> Checked:
        """Test whether the route answers without a key."""
        answered, _text = self._ask(route, _PROBES)
        if not answered.open and not answered.shut:
            return _not_given(exposure, "probe", answered)
        status, reason = _verdict(route, answered, self.loaded)
        command = self._command(route) if status is Status.EXPOSED else ""
        return one_finding(
            exposure,
            "probe",
            status,
            reason,
            route.remedy,
            sought=route.gives,
            command=command,
            queries=answered.requests,
        )

    def _command(self, route: Route) -> str:
        """Return the command that reads from an open route; none if this audit does so itself."""
        url = self.server.url
        model = "MODEL"
        if self.loaded is not None:
            if route.gives == STATES or route.numbered:
                return ""
            model = shlex.quote(self.loaded.name)
        if route.gives == VECTOR:
            return f"keyhole audit {url}/v1/embeddings --model {model} --known FILE"
        if route.gives == CACHE:
            return f"keyhole audit SAVED-SLOT --model {model}"
        named_by_text = route.gives == LOGPROBS and not route.numbered
        # `keyhole extract` refuses SGLang, since its queries would crash the server.
        if named_by_text and self.server.kind != "SGLang":
            return f"keyhole extract {url}/v1/completions --method output-layer"
        return f"keyhole audit {url} --model {model}"

    def _ask(
        self,
        route: Route,
        texts: Sequence[str],
        *,
        key: bool = False,
    ) -> tuple[Answered, str]:
        """Return the first answer and its text; with a `key`, send the API key.

        If it has fewer log-probabilities than a state needs, ask for those of chosen
        tokens.
        """
        answered, text = _first_answer(self.server, route, texts, key=key)
        needed = _needed(self.loaded)
        if not route.chosen or not answered.open or len(answered.content) >= needed:
            return answered, text
        # Any tokens will do: the first, or if the vocabulary is known, some from all of
        # it.
        count = size = _SURPLUS * needed
        if self.loaded is not None:
            size = len(anatomy(self.loaded.model).table)
        tokens = range(0, size, max(1, size // count))
        chosen = self.server.ask_tokens(route, text, tokens, key=key)
        if chosen.open:
            return chosen, text
        return answered, text

    def _texts(
        self,
        loaded: Loaded,
        route: Route,
        exposure: Exposure,
        track: Track,
    ) -> Checked:
        """Send texts, and read them back from the states that the server returns."""
        layers = anatomy(loaded.model).layers
        progress = track(words.exposure(exposure), len(self.texts))
        recoveries: list[TextRecovery] = []
        refused: list[Answered] = []
        texts: list[str] = []
        for number, text in enumerate(self.texts):
            progress(number)
            answered = self.server.try_route(route, text, key=True)
            if not answered.open:
                refused.append(answered)
                continue
            texts.append(text)
            leak: Leak = HiddenStates(torch.tensor(answered.content), layers)
            arithmetic = nullcontext()
            if route.arithmetic:
                target = Attacked.of(loaded.model, loaded.tokenizer)
                # The leak states the server's rounding as noise, which the judge allows
                # for. Where that was measured to help, our model also rounds in the
                # same way.
                leak = replace(leak, noise=served_noise(target, leak, route.arithmetic))
                if route.arithmetic == EIGHT_BITS:
                    arithmetic = as_served(target, leak.exposure)
            with arithmetic:
                recoveries.append(recover_text(loaded.model, loaded.tokenizer, leak))
        progress(len(self.texts))
        if not recoveries:
            return _not_given(exposure, "none", refused[0])
        originals = originals_of(loaded, texts)
        readings = readings_of(loaded.tokenizer, originals, recoveries)
        result = Readings("hidden", layers, "as served", readings)
        status, reason = verdict([result], recoveries[0].reason)
        if status is Status.UNSOLVED:
            status, reason = unread(recoveries, reason)
        if refused:
            others = words.number(len(refused), "other text", "other texts")
            reason += f"; refused for {others}: {refused[0].reason}"
        return one_finding(
            exposure,
            recoveries[0].method,
            status,
            reason,
            route.remedy,
            queries=len(self.texts),
            known=result.known,
            sought="text",
            texts=(result,),
        )

    def _state(
        self,
        loaded: Loaded,
        route: Route,
        exposure: Exposure,
        _: Track,
    ) -> Checked:
        """Compute the last state from log-probabilities, and compare it with the model's own."""
        if head_of(loaded.model) != "causal":
            return one_skip(exposure, "none", _NO_HEAD)
        answered, text = self._ask(route, self.texts, key=True)
        if not answered.open:
            return _not_given(exposure, "none", answered)
        status, reason, error = _compare_state(loaded, text, answered.content, route)
        return one_finding(
            exposure,
            "final_states",
            status,
            reason,
            route.remedy,
            error=error,
            sought="last state",
            queries=answered.requests,
        )


def _with_weights(identity: str, loaded: Loaded | None) -> str:
    """Return an endpoint's identity with that of the weights that its answers are read with."""
    if loaded is None:
        return identity
    return f"{identity}; {loaded.identity}"


def _first_answer(
    server: Server,
    route: Route,
    texts: Sequence[str],
    *,
    key: bool = False,
) -> tuple[Answered, str]:
    """Return the answer to the first text for which the route returns something, and the text."""
    answered = Answered()
    text = ""
    for text in texts:
        answered = server.try_route(route, text, key=key)
        # Only an answer without log-probabilities may depend on the text (see _PROBES).
        if route.gives != LOGPROBS or answered.status != 200 or answered.open:
            break
    return answered, text


def _needed(loaded: Loaded | None) -> int:
    """Return how many log-probabilities a state needs."""
    if loaded is None:
        return _MIN_LOGPROBS
    return anatomy(loaded.model).width + 1


def _not_given(
    exposure: Exposure,
    attack: str,
    answered: Answered,
) -> Checked:
    """Return the skip of a route that is absent, or that did not answer or failed: unchecked."""
    replied = answered.status not in (0, _FAULT)
    return one_skip(
        exposure,
        attack,
        f"not given: {answered.reason}",
        unchecked=not replied,
        absent=replied and not answered.shut,
    )


def _verdict(
    route: Route,
    answered: Answered,
    loaded: Loaded | None,
) -> tuple[Status, str]:
    """Return the status of a route that exists, tried without a key, and the reason."""
    content = answered.content
    if answered.shut:  # tried, and nothing was given away
        return Status.UNSOLVED, f"asks for a key ({answered.status})"
    given = "answers without a key: "
    if route.gives == STATES:
        given += f"{len(content)} rows of {len(content[0])} numbers for {_PROBES[0]!r}"
    elif route.gives == VECTOR:
        # Whether texts can be read from vectors is checked with the encoder
        # (stores.py).
        given += f"one vector of {len(content)} numbers for a text"
    elif route.gives == LOGPROBS:
        given += f"{len(content):,} log-probabilities of the next token"
        needed = _needed(loaded)
        if answered.chosen:
            requests = words.number(answered.requests, "request", "requests")
            given += f", of tokens named in {requests}, past the cap"
        elif len(content) < needed:
            return Status.NOT_IDENTIFIABLE, f"{given}, where a state needs {needed:,}"
    else:
        given += (
            "prompts can be saved to a file, which holds their token ids in the clear"
        )
    return Status.EXPOSED, given


def _compare_state(
    loaded: Loaded,
    text: str,
    logprobs: dict[int, float],
    route: Route,
) -> tuple[Status, str, float | None]:
    """Solve for the last state by least squares, and compare it with the model's own.

    Return a status, the reason, and the error relative to the state's length.
    """
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
    with torch.no_grad():
        states = capture(model, top, ids=_ids(loaded, text))["values"]
    own = states[0, -1].double().cpu()
    error = float((state - own).norm() / own.norm())
    allowed = _TOLERANCE
    if route.arithmetic:
        leak = HiddenStates(own.float()[None], target.parts.layers)
        size = float(own.square().mean().sqrt())
        allowed += served_noise(target, leak, route.arithmetic) / size
    reason = (
        f"the last state from {len(logprobs):,} log-probabilities, {error:.1e} of its length from "
        f"the model's own, where the server's arithmetic allows {allowed:.1e}"
    )
    if error > allowed:
        return Status.MISMATCH, reason, error
    return Status.RECOVERED, reason, error


def _ids(loaded: Loaded, text: str) -> Tensor:
    """Return the ids of a text (1, n)."""
    ids = [loaded.tokenizer(text)["input_ids"]]
    return torch.tensor(ids, device=anatomy(loaded.model).device)


# The last layer, from a server's log-probabilities: its width, and its matrix.
#
# Every answer with the whole vocabulary gives one vector in the span of the output
# matrix, until they span all of it (extract/output_layer.py). That takes hundreds of
# answers, so the attack runs only if its rule is chosen, with up to `QUERIES` of them,
# or with a budget. If the server states a width for which these are too few, only a
# sample is sent, and the reason says how to go on.

QUERIES = 1_024
SAMPLE = 64
# The largest width as a share of the queries: a width of d takes d answers, d/12 to
# show clearly that singular values drop after the d-th, and a few to check.
_MAX_WIDTH = 0.9
REMEDY = (
    "Cap n_probs (20) in a proxy and take logit_bias and post_sampling_probs out of requests, with "
    "which a client chooses the tokens; fewer digits cost an attacker digits of the matrix; "
    "--api-key, and a count of queries per client."
)


def last_layer(
    server: Server,
    route: Route,
    queries: int,
    ledger: str | Path | None,
    exposure: Exposure,
    track: Track,
) -> Checked:
    """Attack the last layer with at most `queries` answers; skip it if they are not complete."""
    answered, _ = _first_answer(server, route, _PROBES, key=True)
    if not answered.open:
        return _not_given(exposure, "OutputLayer", answered)
    address = server.address or server.url
    with closing(Completions.at(f"{address}{route.path}", server.options)) as oracle:
        count = len(answered.content)
        # An unknown vocabulary counts as complete.
        if count < (oracle.vocabulary or count):
            reason = (
                f"{count} log-probabilities at a time: keyhole extract {server.url} --method "
                f"output-layer -o top={route.chosen or count} finds out whether clients may choose "
                "tokens"
            )
            return one_skip(exposure, "OutputLayer", reason)
        if (oracle.width or 0) >= _MAX_WIDTH * queries:
            queries = min(SAMPLE, queries)
        counted = Counted(oracle, queries, track(words.exposure(exposure), queries))
        with ExitStack() as stack:
            remembered: Oracle = counted
            if ledger is not None:
                remembered = stack.enter_context(Ledger(counted, ledger))
            result = OutputLayer()(remembered)
    reason = result.reason
    if result.status is Status.BUDGET:
        reason += f"; go on with keyhole extract {server.url} --method output-layer --ledger FILE"
    return one_finding(
        exposure,
        "OutputLayer",
        result.status,
        reason,
        REMEDY,
        error=result.check and result.check.worst,
        queries=counted.queries,
        lower_bound=result.lower_bound,
        known=result.known,
        sought="last layer",
    )


# Vectors as a prompt.
#
# The audit sends a text as the embeddings of its tokens. If the answer has the model's
# log-probabilities for that text, the server computes on any vectors that it is sent:
# attacks on weights need that, and it is a way past every filter that reads prompts.


def _own_logprobs(loaded: Loaded, text: str) -> Tensor:
    """Return the model's own log-probabilities of the next token of a text."""
    with torch.no_grad():
        logits = loaded.model(_ids(loaded, text)).logits[0, -1]
    return logits.double().log_softmax(-1).cpu()


def _rounding_error(loaded: Loaded, count: int) -> float:
    """Return the most that bfloat16 changes the `count` best log-probabilities of some texts.

    They are other texts than the one that is sent, so that the bound is not made to
    fit.
    """
    error = 0.0
    for text in _PROBES[1:]:
        best = _own_logprobs(loaded, text).topk(count)
        with ARITHMETICS["bfloat16"](loaded.model):
            rounded = _own_logprobs(loaded, text)[best.indices]
        error = max(error, float((rounded - best.values).abs().max()))
    return error


def takes_vectors(
    server: Server,
    loaded: Loaded,
    exposure: Exposure,
    _: Track,
) -> Checked:
    """Test whether the server takes vectors as a prompt without a key."""
    if head_of(loaded.model) != "causal":
        return one_skip(exposure, "none", _NO_HEAD)
    text = _PROBES[0]
    vectors = anatomy(loaded.model).table[_ids(loaded, text)].double().cpu()
    try:
        with closing(VectorPrompts(server, vectors.shape[-1], key=False)) as oracle:
            answer = oracle(vectors)[0]
    except Refused as error:
        return one_skip(exposure, "probe", f"not taken: {error.status}")
    except OracleError as error:
        return one_skip(exposure, "probe", str(error), unchecked=True)
    # Answers have no ids: the largest log-probabilities, in descending order, are
    # compared.
    best = _own_logprobs(loaded, text).topk(len(answer)).values
    error = float((best - answer).abs().max())
    allowed = _TOLERANCE + _rounding_error(loaded, len(answer))
    status = Status.EXPOSED
    meaning = (
        "every attack that asks by vectors may begin (keyhole.oracle.VectorPrompts)"
    )
    if error > allowed:
        status = Status.MISMATCH
        meaning = "another model, or it computes with something else than the vectors"
    reason = (
        "vectors are taken as a prompt without a key; the best log-probabilities are "
        f"{error:.1e} from the model's own, where bfloat16 allows {allowed:.1e}: {meaning}"
    )
    return one_finding(
        exposure,
        "probe",
        status,
        reason,
        FORMS[server.kind].remedy,
        error=error,
        sought="vectors as prompts",
    )


# An endpoint of the Open Inference Protocol that takes texts.
#
# Attacks on weights need vectors as inputs, so none is tried. Each kind of answer is
# judged by the attacks that are known: from a vector for each token the text is read,
# and from one for a whole text as from those of a store. No known attack reads a few
# numbers or a label; this does not prove them safe.

_SUM_TOLERANCE = 1e-3  # of probabilities, which are rounded and should add up to 1
# More unbounded numbers than this are a vector, not a score for each class.
_MAX_CLASSES = 32
# If no model is given.
_ANY_IDS = ((5, 6, 7, 8, 9, 10), (11, 12, 13, 14), (20, 21, 22, 23, 24))
# Variants of KH-TEXT-ANSWERS.
_STATES = "token-vectors"
_LABELS = "labels"
_CLASSES = "classes"
_VECTOR = "vector"
_SCORE = "score"
_REMEDIES = {
    _STATES: "Return a label, or one vector for the whole text: token vectors are as good as text.",
    _VECTOR: "Guard embeddings like the texts themselves: keyhole audit reads stored ones.",
    _CLASSES: "Return the label alone, or round to what clients need.",
    _SCORE: "Round to what clients need.",
    _LABELS: "Limit how often clients may ask.",
}

_COMMANDS = {  # what reads texts from such answers, saved to a file
    _STATES: "keyhole recover MODEL STATES.safetensors",
    _VECTOR: "keyhole audit VECTORS.npy --model MODEL",
}


@dataclass(frozen=True, eq=False)
class AnswersTarget(Part):
    """An endpoint that takes texts, or token ids; its model is `loaded` if it is known."""

    url: str = field(repr=False)  # it may hold a password
    model: str
    options: EndpointOptions
    loaded: Loaded | None
    texts: Sequence[str]
    name: str = ""
    observed = True

    @property
    def identity(self) -> str:
        address = f"{without_password(self.url)}/v2/models/{self.model}"
        return _with_weights(f"{address}{self.options.chosen}", self.loaded)

    def checks(self, options: AuditOptions) -> list[Check]:  # noqa: ARG002
        exposure = Exposure("KH-TEXT-ANSWERS", part=self.name)
        return [Check(exposure, partial(self._check, exposure))]

    def _check(self, exposure: Exposure, track: Track) -> Checked:
        """Send all texts, then classify each output by its values for them."""
        progress = track("answers to texts", len(self.texts))
        outputs: dict[str, list[Output]] = {}
        try:
            with closing(TextEndpoint(self.url, self.model, self.options)) as endpoint:
                for number, question in enumerate(self._inputs(endpoint), 1):
                    for output in endpoint.ask(question):
                        outputs.setdefault(output.name, []).append(output)
                    progress(number)
        except OracleError as error:
            return one_skip(exposure, "asked", str(error), unchecked=True)
        return joined(
            _finding(exposure, name, given) for name, given in outputs.items()
        )

    def _inputs(self, endpoint: TextEndpoint) -> list[str | Sequence[int]]:
        """Return the texts, or their token ids; a few lists of any ids if the model is unknown."""
        if endpoint.takes_texts:
            return list(self.texts)
        max_length = endpoint.length or 512
        if self.loaded is None:
            return [ids[:max_length] for ids in _ANY_IDS[: len(self.texts)]]
        return [
            self.loaded.tokenizer(text)["input_ids"][:max_length] for text in self.texts
        ]


def _finding(
    exposure: Exposure,
    name: str,
    outputs: Sequence[Output],
) -> Checked:
    """Return the finding about one output of an endpoint."""
    kind, what = _kind(name, outputs)
    status = Status.EXPOSED
    reason = f"answers {len(outputs)} texts with {what}"
    if kind not in _COMMANDS:
        status = Status.NOT_APPLICABLE
        reason += "; no attack reads weights or texts from that"
    sought = STATES if kind == _STATES else "answers"
    return one_finding(
        replace(exposure, variant=kind, name=name),
        "asked",
        status,
        reason,
        _REMEDIES[kind],
        queries=len(outputs),
        sought=sought,
        command=_COMMANDS.get(kind, ""),
    )


def _kind(name: str, outputs: Sequence[Output]) -> tuple[str, str]:
    """Return the kind of an output, a key of `_REMEDIES`, and a description of its values."""
    first = outputs[0]
    if first.values is None:
        labels = sorted({label for output in outputs for label in output.labels})
        some = ", ".join(repr(label[:20]) for label in labels[:4])
        return _LABELS, f"labels ({some})"
    if first.datatype and first.datatype not in FLOATS and first.values.numel() == 1:
        return _LABELS, f"the number of a class, in {first.datatype}"
    values = [output.values for output in outputs if output.values is not None]
    rows = torch.cat([torch.atleast_2d(value).flatten(0, -2) for value in values])
    count = rows.shape[1]
    if first.values.ndim > 1:  # of one text, so not a batch
        return _STATES, f"{count:,} numbers for each token"
    if count == 1:
        return _SCORE, "one number"

    def are(figures: Tensor, expected: float) -> bool:
        return bool(((figures - expected).abs() <= _SUM_TOLERANCE).all())

    numbers = f"{count:,} numbers"
    if (rows >= 0).all() and are(rows.sum(1), 1):
        return _CLASSES, f"{numbers}, probabilities"
    if (rows <= 0).all() and are(rows.logsumexp(1), 0):
        return _CLASSES, f"{numbers}, log-probabilities"
    if "logit" in name.lower():
        return _CLASSES, f"{numbers}, logits"
    if count > 2 and are(rows.norm(dim=1), 1):
        return _VECTOR, f"{numbers}, of length one"
    if count > _MAX_CLASSES:
        return _VECTOR, f"{numbers}, of any size"
    return _CLASSES, f"{numbers}, of any size"
