"""Words and figures that several formats of the report share.

Findings and exposures hold fields alone: the words for them are made here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from itertools import groupby

from markupsafe import Markup, escape

from keyhole.assess import Assessment, Item, Policy, State
from keyhole.assess.severity import cost, is_vector
from keyhole.core import Audit, Finding, Outcome, Skip, Status
from keyhole.core.exposure import NOT_CHECKED, RETURNS, Exposure, is_returned, needs
from keyhole.core.finding import Estimate, Reading
from keyhole.core.text import inert, legible, number, percent

# The words for exposures, by rule, variant and defences. `{of_layer}` becomes " of
# layer 3" if the exposure comes from a layer, `{name}` the target's own name for it.
EXPOSURES: dict[tuple[str, ...], str] = {
    ("KH-WEIGHTS-SCORES", ""): "any answer",
    ("KH-WEIGHTS-SCORES", "full"): "full scores",
    ("KH-WEIGHTS-SCORES", "budget"): "scores under a budget",
    ("KH-WEIGHTS-SCORES", "low-rank"): "full scores, low-rank head",
    ("KH-WEIGHTS-SCORES", "heads"): "scores of several heads",
    ("KH-WEIGHTS-SCORES", "transformer"): "scores of a small Transformer",
    ("KH-WEIGHTS-ROUNDED-SCORES", ""): "rounded scores",
    ("KH-WEIGHTS-ROUNDED-SCORES", "", "decimals-3"): "scores rounded to 3 decimals",
    (
        "KH-WEIGHTS-ROUNDED-SCORES",
        "",
        "decimals-3",
        "norm-10",
    ): "scores rounded to 3 decimals, inputs of norm 10 at most",
    ("KH-WEIGHTS-ROUNDED-SCORES", "defended"): "scores behind a defence: {name}",
    ("KH-WEIGHTS-SIGNS", ""): "signs",
    ("KH-WEIGHTS-SIGNS", "labels"): "labels",
    ("KH-WEIGHTS-VECTORS", "last-token"): "the last token's vector",
    ("KH-WEIGHTS-VECTORS", "every-token"): "every token's vector",
    ("KH-WEIGHTS-LAST-LAYER", ""): "last layer from {name}",
    ("KH-WEIGHTS-VECTOR-PROMPTS", ""): "prompts of vectors: {name}",
    ("KH-INPUTS-LAYER-OUTPUT", ""): "a layer's output",
    ("KH-INPUTS-LAYER-OUTPUT", "", "decimals-3"): "a layer's output to 3 decimals",
    ("KH-INPUTS-LAYER-OUTPUT", "causal"): "a causal layer's output",
    (
        "KH-INPUTS-LAYER-OUTPUT",
        "causal",
        "decimals-3",
    ): "a causal layer's output to 3 decimals",
    ("KH-INPUTS-ATTENTION-MAPS", ""): "a layer's output and attention maps",
    (
        "KH-INPUTS-ATTENTION-MAPS",
        "causal",
    ): "a causal layer's output and attention maps",
    ("KH-TEXT-HIDDEN-STATES", ""): "hidden states{of_layer}",
    ("KH-TEXT-HIDDEN-STATES", "", "rotated"): "hidden states{of_layer}, rotated",
    ("KH-TEXT-HIDDEN-STATES", "permuted"): "hidden states in no order{of_layer}",
    ("KH-TEXT-HIDDEN-STATES", "route"): "token states: {name}",
    ("KH-TEXT-HIDDEN-STATES", "served"): "text from {name}",
    ("KH-TEXT-KEYS-AND-VALUES", ""): "keys and values{of_layer}",
    ("KH-TEXT-KEYS-AND-VALUES", "", "rotated"): "keys and values{of_layer}, rotated",
    (
        "KH-TEXT-KEYS-AND-VALUES",
        "",
        "shielded",
    ): "keys and values{of_layer}, by KV-Shield",
    (
        "KH-TEXT-KEYS-AND-VALUES",
        "",
        "cloaked",
    ): "keys and values{of_layer}, by KV-Cloak",
    ("KH-TEXT-KEYS-AND-VALUES", "", "mixed"): "keys and values{of_layer}, mixed",
    ("KH-TEXT-KEYS-AND-VALUES", "route"): "cache files: {name}",
    ("KH-TEXT-ATTENTION-MAPS", ""): "attention maps{of_layer}",
    ("KH-TEXT-ATTENTION-OUTPUT", ""): "attention output before the residual{of_layer}",
    ("KH-TEXT-LOG-PROBABILITIES", ""): "next-token logits",
    ("KH-TEXT-LOG-PROBABILITIES", "route"): "log-probabilities: {name}",
    ("KH-TEXT-LOG-PROBABILITIES", "last-state"): "last state from {name}",
    ("KH-TEXT-EMBEDDING", ""): "pooled embedding",
    ("KH-TEXT-EMBEDDING", "stored"): "stored embedding",
    ("KH-TEXT-EMBEDDING", "defended"): "stored embedding behind a defence: {name}",
    ("KH-TEXT-EMBEDDING", "route"): "embedding: {name}",
    ("KH-TEXT-GRADIENT", ""): "gradient of a batch of texts",
    ("KH-TEXT-TOKEN-IDS", ""): "token ids in {name}",
    ("KH-TEXT-ANSWERS", ""): "answers to texts",
    ("KH-TEXT-ANSWERS", "token-vectors"): "a vector for each token: output {name}",
    ("KH-TEXT-ANSWERS", "labels"): "labels: output {name}",
    ("KH-TEXT-ANSWERS", "classes"): "a number for each class: output {name}",
    ("KH-TEXT-ANSWERS", "vector"): "a vector for the text: output {name}",
    ("KH-TEXT-ANSWERS", "score"): "one score: output {name}",
    ("KH-TEXT-OTHER", ""): "the text",
    ("KH-PREDICTIONS-CUTS", ""): "attention cut",
    ("KH-PREDICTIONS-CUTS", "head"): "{name} of each head's attention cut",
    (
        "KH-PREDICTIONS-CUTS",
        "head-released",
    ): "{name} of each head's attention cut, as released",
    (
        "KH-PREDICTIONS-CUTS",
        "head-random",
    ): "{name} of each head's attention cut at random",
    ("KH-PREDICTIONS-CUTS", "model"): "{name} of all attention cut",
    (NOT_CHECKED, "target"): "the target",
    (
        NOT_CHECKED,
        "demo",
    ): "the text and the predictions of the classifier that ships with Keyhole",
    (NOT_CHECKED, "routes"): "what routes return",
    (NOT_CHECKED, "others"): "all but {name}",
}
_UNNAMED = {  # in place of a missing name
    "KH-PREDICTIONS-CUTS": "a share",
    "KH-TEXT-ANSWERS": "without a name",
}


def exposure(given: Exposure, layers: Sequence[int] = ()) -> str:
    """Return the words for an exposure; `layers` are several layers in place of its own."""
    words = EXPOSURES.get((given.rule, given.variant, *given.defences))
    if given.variant == "file":
        words = f"{EXPOSURES[given.rule, '']} in {{name}}"
    if words is None:  # of a method that somebody added
        parts = [given.variant or given.rule, given.name, *given.defences]
        words = re.sub("[{}]", "", ", ".join(filter(None, parts))) + "{of_layer}"
    if given.layer is not None and not layers:
        layers = (given.layer,)
    of_layer = ""
    if layers:
        of_layer = f" of layers {spans(layers)}"
    if len(layers) == 1:
        of_layer = f" of layer {layers[0]}"
    name = given.name or _UNNAMED.get(given.rule, "")
    return words.format(of_layer=of_layer, name=name)


def in_full(given: Exposure, layers: Sequence[int] = ()) -> str:
    """Return the words for an exposure and its part: two parts may expose the same."""
    return ", ".join(filter(None, (exposure(given, layers), given.part)))


def skip(given: Skip) -> str:
    if given.layers:
        return in_full(given.exposure, given.layers)
    return exposure(given.exposure)


def spans(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 2–5, 7–11."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in run]
        part = str(row[0])
        if len(row) > 1:
            part += f"–{row[-1]}"
        parts.append(part)
    return ", ".join(parts)


SHOWN = 100  # texts that a page shows; the JSON file has all
_GOOD_LENGTH = 60  # characters of an example that is easy to read
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def counts(assessment: Assessment) -> str:
    total = len(assessment.items)
    if not total:
        return "no check was made"
    outcomes = Counter(item.finding.outcome for item in assessment.items)
    ways = assessment.ways
    exposed = len(assessment.exposed) - ways
    others = {
        "found a way open": ways,
        "found nothing": outcomes[Outcome.KEPT],
        "had no result": outcomes[Outcome.UNCHECKED],
    }
    parts = [f"{exposed} of {number(total, 'check', 'checks')} gave something away"]
    parts += [f"{count} {words}" for words, count in others.items() if count]
    return ", ".join(parts)


def unfinished(audit: Audit) -> list[str]:
    """Return each reason why attacks had no result, with the exposures that it is about."""
    reasons: dict[str, list[str]] = {}
    for finding in audit.attacks:
        if finding.outcome is Outcome.UNCHECKED:
            reasons.setdefault(finding.reason, []).append(exposure(finding.exposure))
    return [
        f"{', '.join(dict.fromkeys(about))}: {reason}"
        for reason, about in reasons.items()
    ]


def unchecked(assessment: Assessment) -> list[str]:
    findings = [
        in_full(item.finding.exposure)
        for item in assessment.items
        if item.finding.outcome is Outcome.UNCHECKED
    ]
    return [*findings, *map(skip, assessment.audit.unchecked_skips)]


def begins(sample: int, population: int) -> str:
    """Say how many texts of a store will be read."""
    texts = number(population, "text", "texts")
    if sample == population:
        return f"reading all of {texts}, the shortest first"
    return f"reading {sample:,} of {texts}, chosen at random, the shortest first"


def so_far(
    last: Sequence[Reading],
    tried: Sequence[Reading],
    sample: int,
    population: int,
) -> str:
    """Say what was just read of a store, and what share of its texts can be read.

    The interval holds whether all of the texts that were not tried yet can be read, or
    none.
    """
    exact = sum(reading.exact and reading.verified for reading in tried)
    least = Estimate.of(exact, sample, population).least
    most = Estimate.of(exact + sample - len(tried), sample, population).most
    share = Estimate(exact, sample, population, least, most).share
    words = f"read {exact} of {sample} ({len(tried)} tried); {share} of your texts"
    texts = [_recovered(reading) for reading in last if reading.exact]
    if not texts:
        return words
    return f"{words}: {legible('; '.join(texts))}"


def summary(assessment: Assessment) -> str:
    """Return a sentence with a figure about the worst finding, preferably about texts."""
    findings = [each.finding for each in assessment.exposed if not each.finding.open]
    if not findings:
        return ""
    read = next(filter(example, findings), None)
    if read is None:
        worst = findings[0]
        return f"The worst: {in_full(worst.exposure)}, {outcome(worst)}."
    cell = read.texts[0]
    texts = number(len(cell.readings), "text was", "texts were")
    return f"{cell.exact:,} of {texts} read word for word ({in_full(read.exposure)})."


def _recovered(reading: Reading) -> str:
    return "".join(piece.text for piece in reading.pieces)


def example(finding: Finding) -> str:
    """Return a text that was read exactly and is of a good length to be quoted."""
    first = _readings(finding)[:SHOWN]
    exact = [reading for reading in first if reading.exact and reading.verified]
    texts = [reading.original or _recovered(reading).strip() for reading in exact]
    return min(texts, key=lambda text: abs(len(text) - _GOOD_LENGTH), default="")


def apart(assessment: Assessment) -> str:
    """Say what is not in the counts: controls, and checks that were not made."""
    parts = (
        (len(assessment.controls), "control", "controls"),
        (len(assessment.audit.skips), "check not made", "checks not made"),
    )
    words = ", ".join(number(*part) for part in parts if part[0])
    return words and f"not counted: {words}"


def assumed(assessment: Assessment) -> str:
    """Say what the service is assumed to return, or returns although somebody said otherwise."""
    stated = assessment.audit.returns
    if stated:
        seen = [i.finding.exposure for i in assessment.exposed if i.finding.observed]
        needed = [needs(each) for each in seen if not is_returned(each, stated)]
    else:
        items = assessment.items
        needed = [needs(i.finding.exposure) for i in items if not i.finding.observed]
    names = ", ".join(name for name in RETURNS if name in needed)
    if not names:
        return ""
    if stated:
        return f"Said to return {', '.join(stated)}, but {names} were seen as well, and count."
    return (
        f"Assumed that your service returns all that was looked at: {names}. Say what it does "
        "return with --returns, or returns in keyhole.toml."
    )


def hypothetical(assessment: Assessment) -> str:
    """Return the heading of findings that do not count because the service returns other things."""
    return (
        f"Hypothetical: not returned, where {', '.join(assessment.audit.returns)} are"
    )


def outcome(finding: Finding) -> str:
    """Say in a word or two what became of the secret."""
    share = percent(finding.known)
    if finding.outcome is Outcome.UNCHECKED:
        return "could not check"
    if finding.open and finding.command:
        return "open, not tried"
    if finding.open:
        return "open"
    if is_vector(finding) and finding.status is Status.RECOVERED:
        return "vector recovered"
    if finding.sought == "prediction":
        tried = finding.tried
        if not tried:
            return f"{share} flipped"
        return f"{round(finding.known * tried):,} of {tried:,} flipped ({share})"
    if finding.estimate is not None:
        given = finding.estimate
        share = given.share
        if given.sample < given.population:
            share += " of all"
        return f"{given.exact:,} of {given.sample:,} texts ({share})"
    if finding.status in (Status.RECOVERED, Status.WITHIN):
        return finding.status.value
    if finding.sought == "text":
        for cell in finding.texts[:1]:
            if cell.kind == "pooled" and cell.exact:  # one vector: all or nothing
                return f"{cell.exact} of {len(cell.readings)} texts"
        return _share_of_tokens(finding)
    if finding.status is Status.INEXACT:
        return "nearly recovered"
    if finding.known and finding.sought == "weights":
        return f"{share} known"
    return "not recovered"


def sentence(item: Item) -> str:
    """Say all of a finding: what it is about, what became of it, at what cost, and what to do."""
    finding = item.finding
    name = in_full(finding.exposure)
    parts = [f"{name}: {outcome(finding)} ({finding.attack}, {cost(finding)})."]
    if finding.exposed:
        parts.append(f"Severity {item.severity}, score {item.score} of 10: {item.why}.")
    if item.state is State.UNTRIED:
        parts.append("Not tried this time; this is what the baseline has.")
    parts.append(finding.reason)
    if finding.command:
        parts.append(f"Try it: {finding.command}")
    if finding.exposed and finding.remedy:
        parts.append(f"Fix: {finding.remedy}")
    return " ".join(filter(None, parts))


def _share_of_tokens(finding: Finding) -> str:
    share = percent(finding.known)
    pieces = [piece for reading in _readings(finding) for piece in reading.pieces]
    right = sum(piece.counts for piece in pieces)
    # A damaged file may have another share than its tokens.
    if not pieces or percent(right / len(pieces)) != share:
        return f"{share} of tokens"
    return f"{right:,} of {len(pieces):,} tokens ({share})"


def _readings(finding: Finding) -> Sequence[Reading]:
    return next((cell.readings for cell in finding.texts), ())


def brief(remedy: str) -> str:
    """Return the first sentence of a remedy, which is all that a card shows."""
    return _SENTENCE_END.split(remedy, maxsplit=1)[0]


def error(finding: Finding) -> str:
    if finding.error is None:
        return "–"
    return f"{finding.error:.1e}"


def unbroken(text: str) -> Markup:
    """Escape a text, and keep a browser from breaking options such as --model after a hyphen."""
    escaped = str(escape(legible(text)))
    marked = _OPTION.sub(r'<span class="option">\1</span>', escaped)
    return Markup(marked)  # noqa: S704 - the text is escaped


def ruling(assessment: Assessment) -> str:
    """Say what a policy and a baseline decided; empty if neither was given."""
    decision = assessment.decision
    states = Counter(item.state for item in assessment.items if item.state is not None)
    if decision is None or (decision.policy == Policy().source and not states):
        return ""
    ends = {0: "passes", 1: "fails", 3: "cannot be judged"}
    words = f"It {ends[decision.exit_code]}: {decision.rule} ({decision.policy})."
    counts = {
        **states,
        "gone": len(assessment.gone),
        "not tried, as before": len(assessment.untried),
    }
    changes = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    if assessment.other:
        return (
            f"{words} The baseline is of another target ({assessment.other}), so all is new: if it "
            "is the same, give both audits one --name."
        )
    if changes:
        return f"{words} Since the baseline: {changes}."
    return words


def version(audit: Audit) -> str:
    return inert(audit.environment.get("keyhole", "unknown"), 60)


_MAX_SLUG = 80  # letters


def slug(text: str) -> str:
    """Return ASCII letters, digits and hyphens, with a digest if other characters were lost."""
    plain = re.sub("[^0-9a-z]+", "-", text[: 4 * _MAX_SLUG].lower()).strip("-")
    plain = plain[:_MAX_SLUG].rstrip("-")
    if plain and text.isascii() and len(text) <= _MAX_SLUG:
        return plain
    mark = sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{plain}-{mark}".strip("-")
