"""The rules that findings fall under: what is exposed, by a name that stays the same for ever.

A rule's id stands in pipelines, policies and baselines: once published it is not given to anything
else. What an exposure of text is, its readings say (`Readings.kind`); of the others the words do,
and a test holds every exposure of the registries against this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from keyhole.core import Finding, Skip
from keyhole.core.errors import InputError


class Family(StrEnum):
    """What is lost."""

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
    """One kind of exposure: `name` in a few words, `about` in a sentence, `guide` to read on.

    `words` are looked for in what a finding calls its exposure, `kinds` are kinds of leaks;
    `counted` is what a finding's `queries` are, one and several, where not the family's.
    """

    id: str
    family: Family
    name: str
    about: str
    guide: str
    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    counted: tuple[str, str] | None = None

    @property
    def units(self) -> tuple[str, str]:
        return self.counted or _UNITS[self.family]


_UNITS = {
    Family.WEIGHTS: ("query", "queries"),
    Family.INPUTS: ("output of the layer", "outputs of the layer"),
    Family.TEXT: ("text", "texts"),
    Family.PREDICTIONS: ("pass of the model", "passes of the model"),
}
_W, _I, _T, _P = Family.WEIGHTS, Family.INPUTS, Family.TEXT, Family.PREDICTIONS

RULES = (  # in the order in which words are looked for
    Rule(
        "KH-WEIGHTS-LAST-LAYER", _W, "Last layer from log-probabilities",
        "Log-probabilities of next tokens are linear in the last layer: enough of them give its "
        "width and its weights up to a change of basis.",
        "docs/servers.md", ("last layer from", "probabilities of the next token"),
    ),
    Rule(
        "KH-WEIGHTS-VECTOR-PROMPTS", _W, "Vectors accepted as prompts",
        "A server that takes vectors in place of tokens can be asked anything, which is what "
        "extraction needs.",
        "docs/servers.md", ("prompts of vectors",),
    ),
    Rule(
        "KH-WEIGHTS-ROUNDED-SCORES", _W, "Weights from rounded or noisy scores",
        "Scores that are rounded, clipped or noisy still determine the weights, to the accuracy "
        "that is left, at a few more queries.",
        "docs/defences.md", ("scores rounded", "rounded scores", "scores behind a defence"),
    ),
    Rule(
        "KH-WEIGHTS-SIGNS", _W, "Weights from labels alone",
        "The sign of a score, or the label, locates the decision boundary; bisection along many "
        "lines gives the weights up to their scale.",
        "docs/choosing.md", ("signs", "labels"),
    ),
    Rule(
        "KH-WEIGHTS-SCORES", _W, "Weights from scores",
        "A score is one equation in the weights: about as many chosen queries as there are "
        "unknowns give all of them.",
        "docs/choosing.md", ("scores", "any answer"),
    ),
    Rule(
        "KH-WEIGHTS-VECTORS", _W, "Weights from vectors",
        "An endpoint that returns vectors gives many equations with every answer, and so its "
        "weights in very few queries.",
        "docs/choosing.md", ("token's vector",),
    ),
    Rule(
        "KH-INPUTS-ATTENTION-MAPS", _I, "Input from a layer's output and attention maps",
        "With its attention maps, what goes into a layer is the solution of linear equations.",
        "docs/inversion.md", ("output and attention maps",),
    ),
    Rule(
        "KH-INPUTS-LAYER-OUTPUT", _I, "Input from a layer's output",
        "Whoever has the weights and the output of an attention layer can search for the input "
        "by Newton's method, and prove that it is the one.",
        "docs/inversion.md", ("layer's output",),
    ),
    Rule(
        "KH-TEXT-TOKEN-IDS", _T, "Token ids stored as they are",
        "A saved state holds the ids of the tokens: no attack is needed to read the text.",
        "docs/servers.md", ("token ids",),
    ),
    Rule(
        "KH-TEXT-GRADIENT", _T, "Text from a gradient",
        "The gradient of a batch spans the states of its tokens: the texts of a client's update "
        "can be read from it.",
        "docs/gradients.md", ("gradient",), ("gradient",), ("update", "updates"),
    ),
    Rule(
        "KH-TEXT-KEYS-AND-VALUES", _T, "Text from cached keys and values",
        "Keys and values are a linear image of the states before them: a cache is as good as the "
        "text.",
        "docs/text.md", ("keys and values", "cache"), ("kv",),
    ),
    Rule(
        "KH-TEXT-ATTENTION-MAPS", _T, "Text from attention maps",
        "Which token looks at which depends on what the tokens are: maps of early layers give the "
        "text.",
        "docs/text.md", ("attention maps",), ("maps",),
    ),
    Rule(
        "KH-TEXT-ATTENTION-OUTPUT", _T, "Text from an attention block's output",
        "What an attention block adds to the states, before the residual.",
        "docs/text.md", ("attention output",), ("attention",),
    ),
    Rule(
        "KH-TEXT-LOG-PROBABILITIES", _T, "Text from next-token scores",
        "A whole vector of next-token logits or log-probabilities determines the last hidden "
        "state, and that the prompt.",
        "docs/text.md", ("next-token", "probabilities", "last state"), ("logits",),
    ),
    Rule(
        "KH-TEXT-EMBEDDING", _T, "Text from embeddings",
        "One vector for a text: short texts, and long ones of a known kind, are read back from it "
        "and verified by encoding them again.",
        "docs/embeddings.md", ("embedding", "one vector", "vector of a text"), ("pooled",),
    ),
    Rule(
        "KH-TEXT-HIDDEN-STATES", _T, "Text from hidden states",
        "A state for every token: with public weights each token is found by comparing its state "
        "with those of all candidates.",
        "docs/text.md", ("hidden states", "state", "numbers for each token"), ("hidden",),
    ),
    Rule(
        "KH-TEXT-ANSWERS", _T, "Answers of an endpoint of texts",
        "What a deployed model answers, and whether it is more than a label.",
        "docs/servers.md", ("output",),
    ),
    Rule(
        "KH-PREDICTIONS-CUTS", _P, "Predictions flipped by cutting attention",
        "Whoever can mask a small share of the attention changes what a classifier says, without "
        "touching the text.",
        "docs/disrupt.md", ("attention cut", "cut"),
    ),
)  # fmt: skip
OTHERS = {
    family: Rule(
        f"KH-{family.upper()}-OTHER", family, f"Another exposure of {family}", family.question,
        "docs/choosing.md",
    )
    for family in Family
}  # fmt: skip
_BY_SOUGHT = {
    "weights": _W, "last layer": _W, "vectors as prompts": _W, "input": _I, "prediction": _P,
}  # fmt: skip


def family_of(finding: Finding) -> Family:
    """What the attacker is after; what is read of a server's routes serves to read text."""
    return _BY_SOUGHT.get(finding.sought, Family.TEXT)


def rule_of(finding: Finding) -> Rule:
    """The rule that a finding falls under."""
    family = family_of(finding)
    rules = [rule for rule in RULES if rule.family is family]
    kinds = [cell.kind for cell in finding.texts[:1]]
    for rule in rules:
        if any(kind in rule.kinds for kind in kinds):
            return rule
    return _by_words(rules, finding.exposure) or OTHERS[family]


def rule_of_skip(skip: Skip) -> Rule | None:
    """The rule of a check that was not made, where its words tell."""
    return _by_words(list(RULES), skip.exposure)


def rule_of_check(name: str) -> Rule:
    """The rule that the findings of a check will fall under; checks are named by what they seek."""
    sought = next((word for word in _CHECKS if name.startswith(word)), "")
    family = _CHECKS.get(sought, Family.TEXT)
    return _by_words([rule for rule in RULES if rule.family is family], name) or OTHERS[family]


_CHECKS = {
    "weights": _W, "last layer": _W, "prompts of vectors": _W, "input": _I, "flips": _P,
}  # fmt: skip


def expect_exposures(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Families, or ids of rules with * for anything; one line for whatever is none of them."""
    known = [rule.id for rule in (*RULES, *OTHERS.values())]
    for name in names:
        if name not in list(Family) and not any(fnmatchcase(rule, name) for rule in known):
            raise InputError(
                f"expected in {where} families ({', '.join(Family)}) or ids of rules (such as "
                f"{RULES[0].id} or KH-TEXT-*), got {name[:60]}"
            )
    return tuple(names)


def asked_for(rule: Rule, only: Sequence[str]) -> bool:
    """Is this rule among the families and rules that somebody wants checked? Nothing is all."""
    return not only or any(name == rule.family.value or fnmatchcase(rule.id, name) for name in only)


def _by_words(rules: list[Rule], exposure: str) -> Rule | None:
    lowered = exposure.lower()
    return next((rule for rule in rules if any(word in lowered for word in rule.words)), None)
