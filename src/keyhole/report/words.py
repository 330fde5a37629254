"""Words and figures that several formats of the report share.

Findings and exposures hold fields alone: the words for them are made here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby

from markupsafe import Markup

from keyhole.assess import Assessment, Policy
from keyhole.assess.severity import is_vector
from keyhole.core import Audit, Finding, Outcome, Skip, Status
from keyhole.core.exposure import NOT_CHECKED, RETURNS, Exposure, is_returned, needs
from keyhole.core.finding import Estimate, Reading
from keyhole.core.text import inert, legible, percent

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
    ("KH-TEXT-HIDDEN-STATES", "file"): "hidden states{of_layer} in {name}",
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
    ("KH-TEXT-KEYS-AND-VALUES", "file"): "keys and values{of_layer} in {name}",
    ("KH-TEXT-ATTENTION-MAPS", ""): "attention maps{of_layer}",
    ("KH-TEXT-ATTENTION-MAPS", "file"): "attention maps{of_layer} in {name}",
    ("KH-TEXT-ATTENTION-OUTPUT", ""): "attention output before the residual{of_layer}",
    ("KH-TEXT-ATTENTION-OUTPUT", "file"): "attention output{of_layer} in {name}",
    ("KH-TEXT-LOG-PROBABILITIES", ""): "next-token logits",
    ("KH-TEXT-LOG-PROBABILITIES", "route"): "log-probabilities: {name}",
    ("KH-TEXT-LOG-PROBABILITIES", "last-state"): "last state from {name}",
    ("KH-TEXT-LOG-PROBABILITIES", "file"): "next-token logits in {name}",
    ("KH-TEXT-EMBEDDING", ""): "pooled embedding",
    ("KH-TEXT-EMBEDDING", "stored"): "stored embedding",
    ("KH-TEXT-EMBEDDING", "defended"): "stored embedding behind a defence: {name}",
    ("KH-TEXT-EMBEDDING", "route"): "embedding: {name}",
    ("KH-TEXT-EMBEDDING", "file"): "pooled embedding in {name}",
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
    if words is None:  # of a method that somebody added
        parts = [given.variant or given.rule, given.name, *given.defences]
        words = ", ".join(
            part.replace("{", "").replace("}", "") for part in parts if part
        )
        words += "{of_layer}"
    numbers = layers or (() if given.layer is None else (given.layer,))
    if numbers:
        of_layer = f" of layer{'' if len(numbers) == 1 else 's'} {spans(numbers)}"
    else:
        of_layer = ""
    return words.format(
        of_layer=of_layer, name=given.name or _UNNAMED.get(given.rule, "")
    )


def in_full(given: Exposure, layers: Sequence[int] = ()) -> str:
    """Return the words for an exposure and its part: two parts may expose the same."""
    words = exposure(given, layers)
    return f"{words}, {given.part}" if given.part else words


def skip(given: Skip) -> str:
    if given.layers:
        return in_full(given.exposure, given.layers)
    return exposure(given.exposure)


def spans(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 2–5, 7–11."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in run]
        parts.append(f"{row[0]}–{row[-1]}" if len(row) > 1 else str(row[0]))
    return ", ".join(parts)


SHOWN = 100  # texts that a page shows; the JSON file has all
_GOOD_LENGTH = 60  # characters of an example that is easy to read
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def counts(assessment: Assessment) -> str:
    total = len(assessment.items)
    ways = sum(item.finding.open for item in assessment.items)
    exposed = len(assessment.exposed) - ways
    unchecked = sum(
        item.finding.outcome is Outcome.UNCHECKED for item in assessment.items
    )
    kept = total - exposed - ways - unchecked
    if not total:
        return "no check was made"
    parts = [f"{exposed} of {number(total, 'check', 'checks')} gave something away"]
    parts += [f"{ways} found a way open"] if ways else []
    parts += [f"{kept} found nothing"] if kept else []
    parts += [f"{unchecked} had no result"] if unchecked else []
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
    items = [
        i.finding for i in assessment.items if i.finding.outcome is Outcome.UNCHECKED
    ]
    skips = [skip(each) for each in assessment.audit.unchecked_skips]
    return [*(in_full(finding.exposure) for finding in items), *skips]


def begins(sample: int, population: int) -> str:
    """Say how many texts of a store will be read."""
    some = f"{sample:,} of {number(population, 'text', 'texts')}, chosen at random"
    if sample == population:
        some = f"all of {number(population, 'text', 'texts')}"
    else:
        some = some
    return f"reading {some}, the shortest first"


def so_far(
    last: Sequence[Reading], tried: Sequence[Reading], sample: int, population: int
) -> str:
    """Say what was just read of a store, and what share of its texts can be read.

    The interval holds whether all of the texts that were not tried yet can be read, or
    none.
    """
    exact = sum(reading.exact and reading.verified for reading in tried)
    least = Estimate.of(exact, sample, population).least
    most = Estimate.of(exact + sample - len(tried), sample, population).most
    share = Estimate(exact, sample, population, least, most).share
    texts = [
        "".join(piece.text for piece in reading.pieces)
        for reading in last
        if reading.exact
    ]
    quoted = f": {legible('; '.join(texts))}" if texts else ""
    return (
        f"read {exact} of {sample} ({len(tried)} tried); {share} of your texts{quoted}"
    )


def summary(assessment: Assessment) -> str:
    """Return a sentence with a figure about the worst finding, preferably about texts."""
    items = [item for item in assessment.exposed if not item.finding.open]
    read = [item for item in items if example(item.finding)]
    if not items:
        return ""
    finding = (read or items)[0].finding
    origin = in_full(finding.exposure)
    if read:
        cell = finding.texts[0]
        texts = number(len(cell.readings), "text was", "texts were")
        return f"{cell.exact:,} of {texts} read word for word ({origin})."
    return f"The worst: {origin}, {outcome(finding)}."


def example(finding: Finding) -> str:
    """Return a text that was read exactly and is of a good length to be quoted."""
    first = _readings(finding)[:SHOWN]
    exact = [reading for reading in first if reading.exact and reading.verified]
    texts = [
        r.original or "".join(piece.text for piece in r.pieces).strip() for r in exact
    ]
    return min(texts, key=lambda text: abs(len(text) - _GOOD_LENGTH), default="")


def apart(assessment: Assessment) -> str:
    """Say what is not in the counts: controls, and checks that were not made."""
    parts = (
        (len(assessment.controls), "control", "controls"),
        (len(assessment.audit.skips), "check not made", "checks not made"),
    )
    words = ", ".join(number(*part) for part in parts if part[0])
    return f"not counted: {words}" if words else ""


def assumed(assessment: Assessment) -> str:
    """Say what the service is assumed to return, or returns although somebody said otherwise."""
    stated = assessment.audit.returns
    if stated:
        seen = [i.finding.exposure for i in assessment.exposed if i.finding.observed]
        more = [needs(each) for each in seen if not is_returned(each, stated)]
        names = ", ".join(name for name in RETURNS if name in more)
        said = f"Said to return {', '.join(stated)}, but {names} were seen as well, and count."
        return said if names else ""
    needed = [
        needs(i.finding.exposure) for i in assessment.items if not i.finding.observed
    ]
    names = [name for name in RETURNS if name in needed]
    if not names:
        return ""
    return (
        f"Assumed that your service returns all that was looked at: {', '.join(names)}. Say what "
        "it does return with --returns, or returns in keyhole.toml."
    )


def hypothetical(assessment: Assessment) -> str:
    """Return the heading of findings that do not count because the service returns other things."""
    return (
        f"Hypothetical: not returned, where {', '.join(assessment.audit.returns)} are"
    )


def number(count: int, single: str, several: str) -> str:
    return f"{count:,} {single if count == 1 else several}"


def outcome(finding: Finding) -> str:
    """Say in a word or two what became of the secret."""
    if finding.outcome is Outcome.UNCHECKED:
        return "could not check"
    if finding.open:
        return "open, not tried" if finding.command else "open"
    if is_vector(finding) and finding.status is Status.RECOVERED:
        return "vector recovered"
    if finding.sought == "prediction":
        share = percent(finding.known)
        tried = finding.tried
        count = round(finding.known * tried)
        if tried:
            return f"{count:,} of {tried:,} flipped ({share})"
        return f"{share} flipped"
    if finding.estimate is not None:
        given = finding.estimate
        of_all = "" if given.sample == given.population else " of all"
        return f"{given.exact:,} of {given.sample:,} texts ({given.share}{of_all})"
    if finding.status in (Status.RECOVERED, Status.WITHIN):
        return finding.status.value
    if finding.sought == "text":
        cell = finding.texts[0] if finding.texts else None
        if (
            cell is not None and cell.kind == "pooled" and cell.exact
        ):  # one vector: all or nothing
            return f"{cell.exact} of {len(cell.readings)} texts"
        return _share_of_tokens(finding)
    if finding.status is Status.INEXACT:
        return "nearly recovered"
    if finding.known and finding.sought == "weights":
        return f"{percent(finding.known)} known"
    return "not recovered"


def _share_of_tokens(finding: Finding) -> str:
    share = percent(finding.known)
    pieces = [piece for reading in _readings(finding) for piece in reading.pieces]
    right = sum(piece.counts for piece in pieces)
    if (
        not pieces or percent(right / len(pieces)) != share
    ):  # as a damaged file may have it
        return f"{share} of tokens"
    return f"{right:,} of {len(pieces):,} tokens ({share})"


def _readings(finding: Finding) -> Sequence[Reading]:
    return finding.texts[0].readings if finding.texts else ()


def brief(remedy: str) -> str:
    """Return the first sentence of a remedy, which is all that a card shows."""
    return _SENTENCE_END.split(remedy, maxsplit=1)[0]


def error(finding: Finding) -> str:
    return "–" if finding.error is None else f"{finding.error:.1e}"


def unbroken(text: str) -> Markup:
    """Escape a text, and keep a browser from breaking options such as --model after a hyphen."""
    parts = _OPTION.split(legible(text))  # every second part is an option
    return Markup().join(
        Markup('<span class="option">{}</span>').format(part) if number % 2 else part
        for number, part in enumerate(parts)
    )


def ruling(assessment: Assessment) -> str:
    """Say what a policy and a baseline decided; empty if neither was given."""
    decision = assessment.decision
    states = Counter(item.state for item in assessment.items if item.state is not None)
    if decision is None or (decision.policy == Policy().source and not states):
        return ""
    ends = {0: "passes", 1: "fails", 3: "cannot be judged"}
    changes = [f"{count} {state}" for state, count in states.items()]
    changes += [f"{len(assessment.gone)} gone"] if assessment.gone else []
    untried = len(assessment.untried)
    changes += [f"{untried} not tried, as before"] if untried else []
    since = f" Since the baseline: {', '.join(changes)}." if changes else ""
    if assessment.other:
        since = (
            f" The baseline is of another target ({assessment.other}), so all is new: if it is the "
            "same, give both audits one --name."
        )
    return f"It {ends[decision.exit_code]}: {decision.rule} ({decision.policy}).{since}"


def version(audit: Audit) -> str:
    return inert(audit.environment.get("keyhole", "unknown"), 60)


def finished(audit: Audit) -> str | None:
    """Return when the audit was finished, in RFC 3339; None if its file has no valid time."""
    try:
        moment = datetime.fromisoformat(audit.created).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment.year >= 1000 else None


def slug(text: str, max_length: int = 80) -> str:
    """Return ASCII letters, digits and hyphens, with a digest if other characters were lost."""
    plain = re.sub("[^0-9a-z]+", "-", text[: 4 * max_length].lower()).strip("-")
    plain = plain[:max_length].rstrip("-")
    is_whole = text.isascii() and len(text) <= max_length
    if plain and is_whole:
        mark = ""
    else:
        mark = sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    return "-".join(part for part in (plain, mark) if part)
