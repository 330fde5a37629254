"""Realistic files: each rule is found at its line, and no other finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyhole import configs
from keyhole.configs.registry import KINDS, RULES, kind_of
from keyhole.report.configurations import as_text

EXAMPLES = Path(__file__).parent / "examples"
EXPECTED = {
    "compose.yml": {
        ("LLAMA-OPEN", 8),
        ("LLAMA-SLOTS", 10),
        ("LLAMA-SLOT-FILES", 10),
        ("LLAMA-METRICS", 10),
        ("LLAMA-TOKEN-STATES", 10),
        ("VLLM-LOGPROBS", 18),
        ("VLLM-HIDDEN-STATES", 20),
        ("VLLM-KEY-FOR-SOME-ROUTES", 22),
        ("QDRANT-OPEN", 29),
        ("CHROMA-OPEN", 32),
        ("CHROMA-RESET", 34),
    },
    "start.sh": {
        ("VLLM-OPEN", 4),
        ("VLLM-LOGPROBS", 5),
        ("VLLM-PROMPT-EMBEDS", 6),
        ("QDRANT-OPEN", 7),
        ("SGLANG-HIDDEN-STATES", 9),
        ("SGLANG-OPEN", 9),
    },
    "Dockerfile": {("LLAMA-OPEN", 2), ("LLAMA-SLOT-FILES", 3), ("LLAMA-PROPS", 5)},
    "kubernetes.yaml": {
        ("VLLM-TOKEN-STATES", 18),
        ("VLLM-KEY-FOR-SOME-ROUTES", 20),
        ("SGLANG-EMBEDDINGS", 26),
    },
    "llama.service": {("LLAMA-OPEN", 5), ("LLAMA-METRICS", 5), ("LLAMA-PROMPT-LOG", 8)},
    "template.yaml": {
        ("LLAMA-SLOT-FILES", 5)
    },  # a key may be in what the template fills in
    "config.json": {("HF-HIDDEN-STATES", 6)},
    "generation_config.json": {("HF-ATTENTIONS", 3), ("HF-SCORES", 4)},
    "model-settings.json": {("SERVED-STATES", 5), ("SERVED-STATES", 9)},
    "config.pbtxt": {
        ("SERVED-LOGITS", 9),
        ("SERVED-CACHE", 11),
        ("SERVED-EMBEDDING", 16),
    },
    "qdrant.yaml": {("QDRANT-OPEN", 5)},
    "chroma.yaml": {("CHROMA-RESET", 3)},
    "closed.yml": set(),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_rule_at_its_line_and_nothing_else(name):
    checked = configs.check([EXAMPLES / name])
    found = {
        (finding.rule.id.removeprefix("KH-CONFIG-"), finding.line)
        for finding in checked.findings
    }
    assert found == EXPECTED[name]
    assert not checked.unread


def test_a_folder_is_checked_file_by_file():
    checked = configs.check([EXAMPLES])
    assert checked.files == len(EXPECTED) == len(list(EXAMPLES.iterdir()))
    assert len(checked.findings) == sum(map(len, EXPECTED.values()))
    assert checked.exit_code() == 1


def test_examples_cover_every_kind_and_nearly_every_rule():
    seen = {f"KH-CONFIG-{rule}" for rules in EXPECTED.values() for rule, _ in rules}
    seen |= {f"KH-CONFIG-{rule}" for rules in OPEN.values() for rule, _ in rules}
    tested_in_other_files = {  # test_programs.py, test_leaked_files.py
        "KH-CONFIG-LLAMA-EMBEDDINGS",
        "KH-CONFIG-VLLM-KV-CACHE",
        "KH-CONFIG-SERVED-MAPS",
        "KH-CONFIG-FILE-LEAK",
        "KH-CONFIG-FILE-SLOT",
        "KH-CONFIG-FILE-STATES",
        "KH-CONFIG-LMCACHE-PLAIN",
        "KH-CONFIG-LMCACHE-REMOTE",
        "KH-CONFIG-LMCACHE-ONE-KEY",
        "KH-CONFIG-VLLM-PREFIX-CACHE",
    }
    assert set(RULES) == seen | tested_in_other_files
    files = [EXAMPLES / name for name in EXPECTED] + [
        WILD / "open" / name for name in OPEN
    ]
    kinds = {kind.name for kind in map(kind_of, files) if kind is not None}
    assert {kind.name for kind in KINDS} - kinds == {
        "leaked files",
        "other configurations",
    }


# Written after files of public repositories; half of them expose something.
WILD = Path(__file__).parent / "wild"
OPEN = {
    "argocd/ollama-app.yaml": {("OLLAMA-OPEN", 18)},
    "dotenv/.env": {("WEAVIATE-OPEN", 4)},
    "ecs/task-definition.json": {("TEI-OPEN", 10)},
    "flux/qdrant-release.yaml": {("QDRANT-OPEN", 18)},
    "hf-space/Dockerfile": {("OLLAMA-OPEN", 8), ("OLLAMA-ORIGINS", 9)},
    "k8s-ollama/ollama.yaml": {("OLLAMA-OPEN", 34)},
    "milvus-config/milvus.yaml": {("MILVUS-OPEN", 19)},
    "milvus-helm/values-gke.yaml": {("MILVUS-OPEN", 8)},
    "milvus-operator/milvus-cluster.yaml": {("MILVUS-OPEN", 12)},
    "milvus-standalone/milvus-standalone-docker-compose.yml": {("MILVUS-OPEN", 22)},
    "ollama-helm/values-prod.yaml": {("OLLAMA-OPEN", 14)},
    "ollama-webui/docker-compose.yml": {("OLLAMA-OPEN", 9)},
    "podman/vllm.container": {("VLLM-OPEN", 6)},
    "rag-stack/compose.yaml": {("TEI-OPEN", 5)},
    "systemd/ollama.service.d/override.conf": {("OLLAMA-OPEN", 2)},
    "tei-helm/values.yaml": {("TEI-OPEN", 10)},
    "tgi-run/run_tgi.sh": {("TGI-OPEN", 9), ("TGI-LOGPROBS", 11)},
    "vllm-stack/values-openai.yaml": {
        ("VLLM-LOGPROBS", 13),
        ("VLLM-PROMPT-EMBEDS", 13),
    },
    "weaviate-helm/values.yaml": {("WEAVIATE-OPEN", 17)},
    "weaviate-local/docker-compose.yml": {("WEAVIATE-OPEN", 20)},
}
NOT_RECOGNISED = {
    "litellm/config.yaml": ("Ollama",),
    "nginx/nginx.conf": (),
    "python/pyproject.toml": ("Ollama", "Chroma"),
    "terraform/main.tf": ("vLLM",),
    "tei-keyed/tei.env": (),
}


@pytest.mark.parametrize("name", OPEN)
def test_findings_in_files_like_those_of_public_repositories(name):
    checked = configs.check([WILD / "open" / name])
    found = {
        (finding.rule.id.removeprefix("KH-CONFIG-"), finding.line)
        for finding in checked.findings
    }
    assert found == OPEN[name]
    assert not checked.skipped
    assert not checked.unread


def test_harmless_files_give_no_findings_and_skipped_files_are_listed():
    folder = WILD / "harmless"
    checked = configs.check([folder])
    assert checked.findings == ()
    assert checked.unread == ()
    skipped = {
        str(Path(file.path).relative_to(folder)): file.mentions
        for file in checked.skipped
    }
    assert skipped == NOT_RECOGNISED
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert (
        checked.files
        == len(files)
        == len({each.path for each in checked.recognised}) + len(skipped)
    )


def test_the_terminal_lists_recognised_and_skipped_files(tmp_path):
    (tmp_path / "compose.yml").write_text(
        "services:\n  a: {image: ollama/ollama}\n  b: {image: qdrant/qdrant}\n"
    )
    (tmp_path / "main.tf").write_text('name = "vllm"')
    (tmp_path / "nginx.conf").write_text("listen 80;")
    (tmp_path / "pod.yaml").write_text("a: b\n  image: vllm/vllm-openai\n")
    (tmp_path / "app.py").write_text("import ollama")
    lines = as_text(configs.check([tmp_path])).splitlines()
    assert lines == [
        f"{tmp_path}/compose.yml: recognised Ollama, Qdrant",
        f"{tmp_path}/main.tf: not recognised: it names vLLM, and has no form that Keyhole reads",
        f"{tmp_path}/nginx.conf: not recognised: it starts or sets nothing that Keyhole knows",
        f"{tmp_path}/pod.yaml: not recognised: it names vLLM, and is not valid YAML, as templates "
        "are not",
        "1 other file is no configuration by the name: .py 1",
        "read 4 files, 1 server, 1 store, 3 not recognised; 0 findings",
    ]


def test_every_rule_has_all_its_texts():
    for rule in RULES.values():
        assert rule.opens
        assert rule.fix
        assert rule.attack.startswith(("keyhole ", "ls "))
        assert not rule.opens.endswith(".")


def test_ignored_rules_are_not_reported():
    checked = configs.check(
        [EXAMPLES / "chroma.yaml"], ignore=["KH-CONFIG-CHROMA-RESET"]
    )
    assert checked.findings == ()
    assert checked.exit_code() == 0


def test_the_exit_code_depends_on_the_level():
    checked = configs.check([EXAMPLES / "chroma.yaml"])  # medium
    codes = {level: checked.exit_code(level) for level in configs.Level}
    assert codes == {
        configs.Level.LOW: 1,
        configs.Level.MEDIUM: 1,
        configs.Level.HIGH: 0,
    }
