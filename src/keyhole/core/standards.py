"""Entries of public security frameworks that rules refer to, with the edition of each framework.

All are taken from the frameworks' own sources: the OWASP Top 10 for LLM Applications
(2025, and 2026, which renumbers most entries), OWASP AISVS 1.0 (which froze the
identifiers that its drafts still changed), MITRE ATLAS 5.6.0 and CWE 4.20. A rule
refers to an entry only if both are about the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keyhole.core.errors import InputError


@dataclass(frozen=True)
class Framework:
    """An edition of a framework; `key` is its name in policies."""

    key: str
    name: str
    version: str
    organization: str
    uri: str


OWASP_2026 = Framework(
    "owasp",
    "OWASP Top 10 for LLM Applications 2026",
    "2026",
    "OWASP",
    "https://github.com/GenAI-Security-Project/GenAI-LLM-Top10/tree/main/2026/final",
)
OWASP_2025 = Framework(
    "owasp",
    "OWASP Top 10 for LLM Applications 2025",
    "2025",
    "OWASP",
    "https://genai.owasp.org/llm-top-10/",
)
AISVS = Framework(
    "aisvs",
    "OWASP AISVS",
    "1.0",
    "OWASP",
    "https://github.com/OWASP/AISVS/tree/main/1.0/en",
)
ATLAS = Framework("atlas", "MITRE ATLAS", "5.6.0", "MITRE", "https://atlas.mitre.org")
CWE = Framework("cwe", "CWE", "4.20", "MITRE", "https://cwe.mitre.org")
FRAMEWORKS = (OWASP_2026, OWASP_2025, AISVS, ATLAS, CWE)


@dataclass(frozen=True)
class Standard:
    """An entry of a framework."""

    framework: Framework
    id: str
    name: str
    path: str = ""  # of its page, relative to the framework's

    @property
    def uri(self) -> str:
        return f"{self.framework.uri}{self.path}"


LLM02 = (
    Standard(OWASP_2026, "LLM02:2026", "Sensitive Information Disclosure"),
    Standard(OWASP_2025, "LLM02:2025", "Sensitive Information Disclosure"),
)
VECTORS = (
    Standard(OWASP_2026, "LLM09:2026", "Vector and Embedding Weaknesses"),
    Standard(OWASP_2025, "LLM08:2025", "Vector and Embedding Weaknesses"),
)
# its examples include model extraction through an API and log-probabilities
CONSUMPTION = (
    Standard(OWASP_2026, "LLM06:2026", "Unbounded Consumption"),
    Standard(OWASP_2025, "LLM10:2025", "Unbounded Consumption"),
)
MASKED_FIELDS = Standard(
    AISVS, "v1.0-C8.2.1", "Sensitive fields are masked before embedding"
)
TESTED = Standard(AISVS, "v1.0-C11.1.3", "Evaluation against known adversarial attacks")
HARDENED = Standard(AISVS, "v1.0-C11.1.4", "Hardening against adversarial inputs")
RATES = Standard(
    AISVS, "v1.0-C11.2.2", "Rate limits sized to the extraction threat model"
)
RAW_OUTPUTS = Standard(AISVS, "v1.0-C11.3.2", "Raw model outputs are not exposed")
INVERT = Standard(
    ATLAS, "AML.T0024.001", "Invert AI Model", "/techniques/AML.T0024.001"
)
EXTRACT = Standard(
    ATLAS, "AML.T0024.002", "Extract AI Model", "/techniques/AML.T0024.002"
)
FILES = Standard(
    ATLAS, "AML.T0025", "Exfiltration via Cyber Means", "/techniques/AML.T0025"
)


def _cwe(number: int, name: str) -> Standard:
    return Standard(CWE, f"CWE-{number}", name, f"/data/definitions/{number}.html")


EXPOSED = _cwe(200, "Exposure of Sensitive Information to an Unauthorized Actor")
CLEARTEXT = _cwe(312, "Cleartext Storage of Sensitive Information")
PERTURBED = _cwe(
    1039,
    "Inadequate Detection or Handling of Adversarial Input Perturbations in Automated Recognition "
    "Mechanism",
)

# The entries that rules of one kind have in common.
WEIGHTS_COPIED = (*CONSUMPTION, RATES, RAW_OUTPUTS, EXTRACT, EXPOSED)
INPUTS_READ = (*LLM02, RAW_OUTPUTS, INVERT, EXPOSED)
EMBEDDINGS_READ = (*VECTORS, *LLM02, MASKED_FIELDS, INVERT, EXPOSED)
TEXTS_STORED = (*LLM02, FILES, CLEARTEXT)
GRADIENTS_READ = (*LLM02, EXPOSED)  # no technique of ATLAS is about gradients
PREDICTIONS_FLIPPED = (TESTED, HARDENED, PERTURBED)


def frameworks(
    rules: Iterable[tuple[Standard, ...]],
) -> dict[Framework, list[Standard]]:
    """Return the entries that rules refer to, by framework, sorted by id."""
    named = {standard for standards in rules for standard in standards}
    ordered = sorted(named, key=lambda standard: standard.id)
    return {
        framework: [standard for standard in ordered if standard.framework == framework]
        for framework in FRAMEWORKS
    }


def expect_standard(
    key: str, word: str, known: Mapping[str, tuple[Standard, ...]]
) -> set[str]:
    """Return the rules under an entry of a framework; `known` are the standards of each rule.

    An id may leave out the edition if all editions have it.
    """
    editions = [framework.version for framework in FRAMEWORKS if framework.key == key]
    ids = {
        s.id
        for standards in known.values()
        for s in standards
        if s.framework.key == key
    }
    in_all_editions = {f"{word}:{edition}" for edition in editions}
    wanted = {word} if word in ids else in_all_editions
    if not wanted <= ids:
        raise InputError(
            f"no rule is about {key} {word[:40]}: choose among {', '.join(sorted(ids))}"
        )
    return {
        rule
        for rule, standards in known.items()
        if any(s.id in wanted for s in standards)
    }
