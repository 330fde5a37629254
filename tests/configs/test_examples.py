"""Files as people write them: every rule is found at its line, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import configs
from keyhole.configs.registry import KINDS, RULES, kind_of

EXAMPLES = Path(__file__).parent / "examples"
EXPECTED = {
    "compose.yml": {
        ("LLAMA-OPEN", 8), ("LLAMA-SLOTS", 10), ("LLAMA-SLOT-FILES", 10), ("LLAMA-METRICS", 10),
        ("LLAMA-TOKEN-STATES", 10), ("VLLM-LOGPROBS", 18), ("VLLM-HIDDEN-STATES", 20),
        ("VLLM-KEY-FOR-SOME-ROUTES", 22), ("QDRANT-OPEN", 28), ("CHROMA-OPEN", 30),
        ("CHROMA-RESET", 32),
    },
    "start.sh": {
        ("VLLM-OPEN", 4), ("VLLM-LOGPROBS", 5), ("VLLM-PROMPT-EMBEDS", 6), ("QDRANT-OPEN", 7),
        ("SGLANG-HIDDEN-STATES", 9), ("SGLANG-OPEN", 9),
    },
    "Dockerfile": {("LLAMA-OPEN", 2), ("LLAMA-SLOT-FILES", 3), ("LLAMA-PROPS", 5)},
    "kubernetes.yaml": {
        ("VLLM-TOKEN-STATES", 18), ("VLLM-KEY-FOR-SOME-ROUTES", 20), ("SGLANG-EMBEDDINGS", 26),
    },
    "llama.service": {("LLAMA-OPEN", 5), ("LLAMA-METRICS", 5), ("LLAMA-PROMPT-LOG", 8)},
    "template.yaml": {("LLAMA-SLOT-FILES", 5)},  # a key may be in what the template fills in
    "config.json": {("HF-HIDDEN-STATES", 6)},
    "generation_config.json": {("HF-ATTENTIONS", 3), ("HF-SCORES", 4)},
    "model-settings.json": {("SERVED-STATES", 5), ("SERVED-STATES", 9)},
    "config.pbtxt": {("SERVED-LOGITS", 9), ("SERVED-CACHE", 11), ("SERVED-EMBEDDING", 16)},
    "qdrant.yaml": {("QDRANT-OPEN", 5)},
    "chroma.yaml": {("CHROMA-RESET", 3)},
    "closed.yml": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_each_rule_at_its_line_and_nothing_else(name):
    checked = configs.check([EXAMPLES / name])
    found = {
        (finding.rule.id.removeprefix("KH-CONFIG-"), finding.line) for finding in checked.findings
    }
    assert found == EXPECTED[name]
    assert not checked.unread


def test_a_folder_is_all_of_its_files():
    checked = configs.check([EXAMPLES])
    assert checked.files == len(EXPECTED) == len(list(EXAMPLES.iterdir()))
    assert len(checked.findings) == sum(map(len, EXPECTED.values()))
    assert checked.exit_code() == 1


def test_examples_cover_every_kind_and_nearly_every_rule():
    seen = {f"KH-CONFIG-{rule}" for rules in EXPECTED.values() for rule, _ in rules}
    tested_in_other_files = {  # test_programs.py, test_leaked_files.py
        "KH-CONFIG-LLAMA-EMBEDDINGS", "KH-CONFIG-VLLM-KV-CACHE", "KH-CONFIG-SERVED-MAPS",
        "KH-CONFIG-FILE-LEAK", "KH-CONFIG-FILE-SLOT", "KH-CONFIG-FILE-STATES",
    }  # fmt: skip
    assert set(RULES) == seen | tested_in_other_files
    kinds = {kind_of(EXAMPLES / name) for name in EXPECTED} - {None}
    assert {kind.name for kind in KINDS} - {kind.name for kind in kinds if kind} == {"leaked files"}


def test_rules_are_told_whole():
    for rule in RULES.values():
        assert rule.opens
        assert rule.fix
        assert rule.attack.startswith(("keyhole ", "ls "))
        assert not rule.opens.endswith(".")


def test_what_is_ignored_is_not_reported():
    checked = configs.check([EXAMPLES / "chroma.yaml"], ignore=["KH-CONFIG-CHROMA-RESET"])
    assert checked.findings == ()
    assert checked.exit_code() == 0


def test_levels_decide_what_fails():
    checked = configs.check([EXAMPLES / "chroma.yaml"])  # medium
    codes = {level: checked.exit_code(level) for level in configs.Level}
    assert codes == {configs.Level.LOW: 1, configs.Level.MEDIUM: 1, configs.Level.HIGH: 0}
