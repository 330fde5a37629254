"""Entries of public security frameworks that rules refer to, with the edition of each framework.

All are taken from the frameworks' own sources: the OWASP Top 10 for LLM Applications
(2025, and 2026, which renumbers most entries), OWASP AISVS 1.0 (which froze the
identifiers that its drafts still changed), MITRE ATLAS 5.6.0 and CWE 4.20. A rule
refers to an entry only if both are about the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """An edition of a framework; `key` is its name in SARIF's tags."""

    key: str
    name: str
    version: str


OWASP_2026 = Framework("owasp", "OWASP Top 10 for LLM Applications 2026", "2026")
OWASP_2025 = Framework("owasp", "OWASP Top 10 for LLM Applications 2025", "2025")
AISVS = Framework("aisvs", "OWASP AISVS", "1.0")
ATLAS = Framework("atlas", "MITRE ATLAS", "5.6.0")
CWE = Framework("cwe", "CWE", "4.20")


@dataclass(frozen=True)
class Standard:
    """An entry of a framework."""

    framework: Framework
    id: str
    name: str


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
INVERT = Standard(ATLAS, "AML.T0024.001", "Invert AI Model")
EXTRACT = Standard(ATLAS, "AML.T0024.002", "Extract AI Model")
FILES = Standard(ATLAS, "AML.T0025", "Exfiltration via Cyber Means")
EXPOSED = Standard(
    CWE, "CWE-200", "Exposure of Sensitive Information to an Unauthorized Actor"
)
CLEARTEXT = Standard(CWE, "CWE-312", "Cleartext Storage of Sensitive Information")
PERTURBED = Standard(
    CWE,
    "CWE-1039",
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
