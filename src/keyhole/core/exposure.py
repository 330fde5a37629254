"""Exposures, as values, and the rules that they fall under.

The rule, the layer and the part of the target are fields of an exposure, so nobody has
to parse a sentence for them. Words for people are made from the fields at the very end
(report/words.py), and a change of words changes no id, gate or baseline. Pipelines,
policies and baselines hold ids of rules: a published id is never used for anything
else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from keyhole.core import standards
from keyhole.core.errors import InputError
from keyhole.core.standards import Standard


class Family(StrEnum):
    """The kinds of secrets that a target can give away."""

    WEIGHTS = "weights"
    INPUTS = "inputs"
    TEXT = "text"
    PREDICTIONS = "predictions"

    @property
    def question(self) -> str:
        return _QUESTIONS[self]


_QUESTIONS = {
    Family.WEIGHTS: "Can the model be copied from its answers?",
    Family.INPUTS: "Can the vectors that went in be computed from what comes out?",
    Family.TEXT: "Can the text be read back from what is exposed?",
    Family.PREDICTIONS: "Can a prediction be flipped without touching the text?",
}


@dataclass(frozen=True)
class Rule:
    """A kind of exposure, with its name, a sentence about it, and the guide to read.

    `standards` are the entries of public frameworks about it. `counted` says what a
    finding's `queries` count, in singular and plural; if None, see `_UNITS`. `needs` is
    what a service has to return for it (a key of RETURNS); None if it does not depend
    on what is returned.
    """

    id: str
    family: Family
    name: str
    about: str
    guide: str
    standards: tuple[Standard, ...] = ()
    counted: tuple[str, str] | None = None
    needs: str | None = None

    @property
    def units(self) -> tuple[str, str]:
        return self.counted or _UNITS[self.family]


_UNITS = {
    Family.WEIGHTS: ("query", "queries"),
    Family.INPUTS: ("output of the layer", "outputs of the layer"),
    Family.TEXT: ("text", "texts"),
    Family.PREDICTIONS: ("pass of the model", "passes of the model"),
}
_W = Family.WEIGHTS
_I = Family.INPUTS
_T = Family.TEXT
_P = Family.PREDICTIONS

RULES = (
    Rule(
        "KH-WEIGHTS-LAST-LAYER",
        _W,
        "Last layer from log-probabilities",
        "Log-probabilities of next tokens are linear in the last layer: enough of them give its "
        "width and its weights up to a change of basis.",
        "docs/servers.md",
        standards.WEIGHTS_COPIED,
        needs="log-probabilities",
    ),
    Rule(
        "KH-WEIGHTS-VECTOR-PROMPTS",
        _W,
        "Vectors accepted as prompts",
        "A server that takes vectors in place of tokens can be asked anything, which is what "
        "extraction needs.",
        "docs/servers.md",
        standards.WEIGHTS_COPIED,
        needs="log-probabilities",
    ),
    Rule(
        "KH-WEIGHTS-ROUNDED-SCORES",
        _W,
        "Weights from rounded or noisy scores",
        "Scores that are rounded, clipped or noisy still determine the weights, to the accuracy "
        "that is left, at a few more queries.",
        "docs/defences.md",
        standards.WEIGHTS_COPIED,
        needs="scores",
    ),
    Rule(
        "KH-WEIGHTS-SIGNS",
        _W,
        "Weights from labels alone",
        "The sign of a score, or the label, locates the decision boundary; bisection along many "
        "lines gives the weights up to their scale.",
        "docs/extraction.md",
        standards.WEIGHTS_COPIED,
        needs="labels",
    ),
    Rule(
        "KH-WEIGHTS-SCORES",
        _W,
        "Weights from scores",
        "A score is one equation in the weights: about as many chosen queries as there are "
        "unknowns give all of them.",
        "docs/extraction.md",
        standards.WEIGHTS_COPIED,
        needs="scores",
    ),
    Rule(
        "KH-WEIGHTS-VECTORS",
        _W,
        "Weights from vectors",
        "An endpoint that returns vectors gives many equations with every answer, and so its "
        "weights in very few queries.",
        "docs/extraction.md",
        standards.WEIGHTS_COPIED,
        needs="embeddings",
    ),
    Rule(
        "KH-INPUTS-ATTENTION-MAPS",
        _I,
        "Input from a layer's output and attention maps",
        "With its attention maps, what goes into a layer is the solution of linear equations.",
        "docs/inversion.md",
        standards.INPUTS_READ,
        needs="attention-maps",
    ),
    Rule(
        "KH-INPUTS-LAYER-OUTPUT",
        _I,
        "Input from a layer's output",
        "Whoever has the weights and the output of an attention layer can search for the input "
        "by Newton's method, and prove that it is the one.",
        "docs/inversion.md",
        standards.INPUTS_READ,
        needs="hidden-states",
    ),
    Rule(
        "KH-TEXT-TOKEN-IDS",
        _T,
        "Token ids stored as they are",
        "A saved state holds the ids of the tokens: no attack is needed to read the text.",
        "docs/servers.md",
        standards.TEXTS_STORED,
        needs="caches",
    ),
    Rule(
        "KH-TEXT-GRADIENT",
        _T,
        "Text from a gradient",
        "The gradient of a batch spans the states of its tokens: the texts of a client's update "
        "can be read from it.",
        "docs/gradients.md",
        standards.GRADIENTS_READ,
        ("update", "updates"),
        needs="gradients",
    ),
    Rule(
        "KH-TEXT-KEYS-AND-VALUES",
        _T,
        "Text from cached keys and values",
        "Keys and values are a linear image of the states before them: a cache is as good as the "
        "text.",
        "docs/text.md",
        standards.INPUTS_READ,
        needs="caches",
    ),
    Rule(
        "KH-TEXT-ATTENTION-MAPS",
        _T,
        "Text from attention maps",
        "Which token looks at which depends on what the tokens are: maps of early layers give the "
        "text.",
        "docs/text.md",
        standards.INPUTS_READ,
        needs="attention-maps",
    ),
    Rule(
        "KH-TEXT-ATTENTION-OUTPUT",
        _T,
        "Text from an attention block's output",
        "What an attention block adds to the states, before the residual.",
        "docs/text.md",
        standards.INPUTS_READ,
        needs="hidden-states",
    ),
    Rule(
        "KH-TEXT-LOG-PROBABILITIES",
        _T,
        "Text from next-token scores",
        "A whole vector of next-token logits or log-probabilities determines the last hidden "
        "state, and that the prompt.",
        "docs/text.md",
        standards.INPUTS_READ,
        needs="log-probabilities",
    ),
    Rule(
        "KH-TEXT-EMBEDDING",
        _T,
        "Text from embeddings",
        "One vector for a text: short texts, and long ones of a known kind, are read back from it "
        "and verified by encoding them again.",
        "docs/embeddings.md",
        standards.EMBEDDINGS_READ,
        needs="embeddings",
    ),
    Rule(
        "KH-TEXT-HIDDEN-STATES",
        _T,
        "Text from hidden states",
        "A state for every token: with public weights each token is found by comparing its state "
        "with those of all candidates.",
        "docs/text.md",
        standards.INPUTS_READ,
        needs="hidden-states",
    ),
    Rule(
        "KH-TEXT-ANSWERS",
        _T,
        "Answers of an endpoint of texts",
        "What a deployed model answers, and whether it is more than a label.",
        "docs/servers.md",
        standards.INPUTS_READ,
    ),
    Rule(
        "KH-PREDICTIONS-CUTS",
        _P,
        "Predictions flipped by cutting attention",
        "Whoever can mask a small share of the attention changes what a classifier says, without "
        "touching the text.",
        "docs/disrupt.md",
        standards.PREDICTIONS_FLIPPED,
        needs="labels",
    ),
    *(
        Rule(
            f"KH-{family.upper()}-OTHER",
            family,
            f"Another exposure of {family}",
            family.question,
            "docs/extraction.md",
        )
        for family in Family
    ),
)
NOT_CHECKED = (
    "KH-NOT-CHECKED"  # in place of a rule, for skips of a whole target or its routes
)
_BY_ID = {rule.id: rule for rule in RULES}


@dataclass(frozen=True)
class Exposure:
    """One thing that a target gives out."""

    rule: str
    """The id of its rule, KH-…"""
    variant: str = ""
    """A short stable key that tells it from the rule's other exposures: `low-rank`."""
    layer: int | None = None
    """The layer that it comes from, if it comes from one."""
    defences: tuple[str, ...] = ()
    """What is done to it before anybody sees it, such as `decimals-3`."""
    name: str = ""
    """The target's own name for it: a route, an output, a file."""
    part: str = ""
    """The part of the target that it belongs to, if the target has several."""

    def __post_init__(self) -> None:
        if self.rule not in _BY_ID and self.rule != NOT_CHECKED:
            raise InputError(f"{self.rule[:60]} is not the id of a rule")

    @property
    def family(self) -> Family:
        return rule_of(self).family

    @property
    def id(self) -> str:
        """Its fields as a word for URLs, the same in every audit: `text-hidden-states-layer-3`."""
        family, _, kind = self.rule.removeprefix("KH-").partition("-")
        words = [family, self.part, kind, self.variant, self.name]
        if self.layer is not None:
            words.append(f"layer-{self.layer}")
        return slug(*words, *self.defences)

    def __str__(self) -> str:
        return self.id

    def narrows(self, other: Exposure) -> bool:
        """Return whether it is the other exposure with more defences."""
        alike = replace(self, defences=()) == replace(other, defences=())
        return alike and set(other.defences) < set(self.defences)


def rule_of(exposure: Exposure) -> Rule:
    """Return the rule of an exposure; `NOT_CHECKED` has none."""
    return _BY_ID[exposure.rule]


RETURNS = {  # what a service may return, and what else follows from each
    "labels": (),
    "scores": ("labels",),
    "log-probabilities": ("scores", "labels"),
    "embeddings": (),
    "hidden-states": ("embeddings",),
    "attention-maps": (),
    "caches": (),
    "gradients": (),
}


def needs(exposure: Exposure) -> str | None:
    """Return what a service has to return for this exposure; None if it depends on nothing."""
    rule = _BY_ID.get(exposure.rule)
    return rule and rule.needs


def is_returned(exposure: Exposure, returns: Sequence[str]) -> bool:
    """Return whether a service that `returns` these has the exposure: yes, if they are unknown."""
    needed = needs(exposure)
    given = {each for name in returns for each in (name, *RETURNS[name])}
    return not returns or needed is None or needed in given


def expect_returns(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names of what a service returns; raise if one is no key of RETURNS."""
    for name in names:
        if name not in RETURNS:
            raise InputError(f"{where} takes {', '.join(RETURNS)}, got {name[:60]}")
    return tuple(names)


def slug(*parts: str) -> str:
    """Join words of letters and digits of any script, in lower case, with hyphens."""
    words = [re.sub(r"[\W_]+", "-", part.lower())[:80].strip("-") for part in parts]
    return "-".join(word for word in words if word)


def expect_exposures(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return names of families, or ids of rules with * as a wildcard; raise if one is neither."""
    for name in names:
        if not any(_is_named(rule, name) for rule in RULES):
            raise InputError(
                f"{where} takes families ({', '.join(Family)}) and ids of rules (such as "
                f"{RULES[0].id} or KH-TEXT-*), got {name[:60]}"
            )
    return tuple(names)


def is_chosen(exposure: Exposure, only: Sequence[str]) -> bool:
    """Return whether an exposure is of these families or rules; without any, all are chosen."""
    return not only or any(_is_named(rule_of(exposure), name) for name in only)


def _is_named(rule: Rule, name: str) -> bool:
    return name == rule.family or fnmatchcase(rule.id, name)
