"""Command lines of servers, one setting at a time."""

from __future__ import annotations

import pytest

from keyhole import configs
from keyhole.configs.command import Word, simple_commands
from keyhole.report.configurations import as_text


def rules(tmp_path, text, name="run.sh"):
    (tmp_path / name).write_text(text)
    found = configs.check([tmp_path / name]).findings
    return {finding.rule.id.removeprefix("KH-CONFIG-") for finding in found}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("llama-server -m x", set()),
        ("llama-server -m x --host 127.0.0.1 --port 80", set()),
        ("llama-server -m x --host=0.0.0.0", {"LLAMA-OPEN"}),
        ("llama-server -m x --host 10.0.0.7 --api-key $KEY", set()),
        ("llama-server -m x --host $HOST", set()),
        ("llama-server -m x --host /run/llama.sock", set()),
        ("LLAMA_API_KEY=k llama-server -m x --host 0.0.0.0", set()),
        ('llama-server --host 0.0.0.0 "$@"', set()),
        ("numactl -N 0 /opt/llama-server --embedding", {"LLAMA-EMBEDDINGS"}),
        ("llama-server --embeddings --pooling mean", {"LLAMA-EMBEDDINGS"}),
        ("sudo apt install llama-server --slots", set()),
        ("bash -c 'llama-server --slots'", {"LLAMA-SLOTS"}),
        ("vllm serve m --host localhost --max-logprobs 20", set()),
        ("vllm serve m --host localhost --max-logprobs 21", {"VLLM-LOGPROBS"}),
        ("vllm serve m --host localhost --max-logprobs $N", set()),
        ("vllm serve m --host localhost --task embed", {"VLLM-TOKEN-STATES"}),
        ("vllm serve m --host localhost --task generate", set()),
        ("vllm serve m --host localhost --runner pooling --convert embed", set()),
        ("vllm serve m --host localhost --pooler-config.task embed", set()),
        (
            "vllm serve m --host localhost --pooler-config.task=token_embed",
            {"VLLM-TOKEN-STATES"},
        ),
        (
            """vllm serve m --host localhost --pooler-config '{"task": "token_embed"}'""",
            {"VLLM-TOKEN-STATES"},
        ),
        (
            "docker run vllm/vllm-openai:v0.20.2 --host localhost --runner pooling",
            {"VLLM-TOKEN-STATES"},
        ),
        (
            "docker run vllm/vllm-openai:v0.21.0 --host localhost --runner pooling",
            set(),
        ),
        ("vllm bench serve --max-logprobs 50", set()),
        (
            "vllm serve m --host localhost "
            """--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "token": "s3cret"}'""",
            {"VLLM-KV-CACHE"},
        ),
        (
            "vllm serve m --host localhost "
            "--kv-transfer-config.kv_connector ExampleHiddenStatesConnector",
            {"VLLM-HIDDEN-STATES"},
        ),
        (
            "vllm serve m --host localhost --enable-prefix-caching",
            {"VLLM-PREFIX-CACHE"},
        ),
        ("vllm serve m --host localhost --no-enable-prefix-caching", set()),
        (
            "vllm serve m --host localhost --enable-prompt-tokens-details",
            {"VLLM-PREFIX-CACHE"},
        ),
        (
            "LMCACHE_REMOTE_URL=redis://cache:6379 vllm serve m --host localhost",
            {"LMCACHE-REMOTE"},
        ),
        ("LMCACHE_REMOTE_URL=rediss://cache:6379 vllm serve m --host localhost", set()),
        ("LMCACHE_LOCAL_DISK=/kv vllm serve m --host localhost", {"LMCACHE-PLAIN"}),
        ("LMCACHE_LOCAL_DISK=False vllm serve m --host localhost", set()),
        ("lmcache server --l1-size-gb 60", set()),
        (
            """lmcache server --l2-adapter '{"type": "fs", "base_path": "/kv"}'""",
            {"LMCACHE-PLAIN"},
        ),
        (
            """lmcache server --l2-adapter '{"type": "fs", "serde": {"type": "fp8"}}' """
            """--l2-adapter '{"type": "resp", "host": "cache", "port": 6379}'""",
            {"LMCACHE-PLAIN", "LMCACHE-REMOTE"},
        ),
        (
            """lmcache server --l2-adapter '{"type": "fs", "base_path": "/kv", "serde": """
            """{"type": "aesgcm", "master_key_path": "/run/secrets/key"}}'""",
            {"LMCACHE-ONE-KEY"},
        ),
        ("pip install lmcache vllm", set()),
        ("vllm serve m ${EXTRA_ARGS}", set()),
        ("vllm serve $MODEL", {"VLLM-OPEN"}),
        ("sglang serve --model-path m --host 0.0.0.0", {"SGLANG-OPEN"}),
        ("sglang serve --model-path m", set()),
        ("chroma run --path d", set()),
        ("chroma run --path d --host 0.0.0.0", {"CHROMA-OPEN"}),
        ("docker run -p 127.0.0.1:6333:6333 qdrant/qdrant", set()),
        ("docker run -e QDRANT__SERVICE__API_KEY qdrant/qdrant", set()),
        ("docker run --rm -p 6333:6333 qdrant/qdrant:v1.15", {"QDRANT-OPEN"}),
        ("qdrant is a store of vectors", set()),
        ("To start, run vllm serve on the host", set()),
        ("if ! vllm serve m; then exit; fi", {"VLLM-OPEN"}),
        (
            "CUDA_VISIBLE_DEVICES=0 python3 -m vllm.entrypoints.openai.api_server",
            {"VLLM-OPEN"},
        ),
        ("docker run --gpus all my/image vllm serve m", {"VLLM-OPEN"}),
        ("OLLAMA_HOST=0.0.0.0 ollama serve", {"OLLAMA-OPEN"}),
        ("OLLAMA_HOST=http://127.0.0.1:11434 ollama serve", set()),
        ("OLLAMA_HOST=:11434 ollama serve", {"OLLAMA-OPEN"}),
        ("OLLAMA_HOST=http://gpu-box:11434 ollama run llama3", set()),
        ("ollama serve", set()),
        ("docker run -d -p 11434:11434 ollama/ollama", {"OLLAMA-OPEN"}),
        ("docker run -d -p 127.0.0.1:11434:11434 ollama/ollama", set()),
        ("docker run --network=host ollama/ollama", {"OLLAMA-OPEN"}),
        ("docker exec ollama ollama pull llama3", set()),
        ("OLLAMA_ORIGINS=https://a.example,* ollama serve", {"OLLAMA-ORIGINS"}),
        ("text-embeddings-router --model-id m --port 80", {"TEI-OPEN"}),
        ("API_KEY=$KEY text-embeddings-router --model-id m", set()),
        (
            "text-generation-launcher --hostname 127.0.0.1 --max-top-n-tokens 21",
            {"TGI-LOGPROBS"},
        ),
        ("docker run -p 80:80 --env-file keys.env x/text-generation-inference", set()),
        ("weaviate --host 127.0.0.1 --port 8080", set()),
        ("AUTHENTICATION_APIKEY_ENABLED=true weaviate --host 0.0.0.0", set()),
        ("milvus run standalone", {"MILVUS-OPEN"}),
        ("COMMON_SECURITY_AUTHORIZATIONENABLED=true milvus run standalone", set()),
        ("./qdrant", {"QDRANT-OPEN"}),
        ("docker exec qdrant ls; echo qdrant; docker pull qdrant/qdrant", set()),
    ],
)
def test_a_command_line(tmp_path, line, expected):
    assert rules(tmp_path, line) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (  # as Dify has it
            "compose.yml",
            "services:\n  m:\n    image: milvusdb/milvus\n    ports: [19530:19530]\n"
            "    environment: {common.security.authorizationEnabled: '${AUTH:-true}'}\n",
            set(),
        ),
        (
            "lmcache.yaml",
            "chunk_size: 256\nlocal_cpu: true\nlocal_disk: file:///kv/\nmax_local_disk_size: 10\n"
            "remote_url: lm://10.0.0.7:65432\nremote_serde: naive\n",
            {"LMCACHE-PLAIN", "LMCACHE-REMOTE"},
        ),
        (
            "lmcache.yaml",
            "chunk_size: 256\nlocal_disk: null\nremote_url: redis://localhost:6379\n"
            "max_local_cpu_size: 5\n",
            set(),
        ),
        ("harmless.yaml", "remote_url: redis://cache:6379\nname: lmcache\n", set()),
        (
            "hostile.yaml",
            "remote_url: {a: b}\nlocal_disk:\nremote_serde: naive\n",
            set(),
        ),
        ("kv.env", "LMCACHE_REMOTE_URL=lm://cache:65432\n", {"LMCACHE-REMOTE"}),
        (
            "Dockerfile",
            "FROM vllm/vllm-tpu:v0.21.0\nENV X=1\nRUN pip install ray\n",
            set(),
        ),
        ("Dockerfile", 'FROM vllm/vllm-openai\nCMD ["--model", "m"]\n', {"VLLM-OPEN"}),
        (
            "compose.yml",
            "services:\n  m: {image: public.ecr.aws/q9/vllm-cpu-release-repo, ports: ['80:80']}\n",
            {"VLLM-OPEN"},
        ),
        (  # another chart's service is not its own
            "values.yaml",
            "vllm:\n  enabled: true\n  image: {repository: openeuler/vllm-cpu, tag: x}\n"
            "nginx:\n  service: {type: NodePort}\n",
            set(),
        ),
        (
            "values.yaml",
            "container:\n  image: {repository: ghcr.io/huggingface/tgi-gaudi, tag: x}\n"
            "service: {type: NodePort}\n",
            {"TGI-OPEN"},
        ),
    ],
)
def test_files_like_those_of_public_repositories(tmp_path, name, text, expected):
    assert rules(tmp_path, text, name) == expected


POD = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: ollama}
spec:
  template:
    metadata: {labels: {app: ollama}}
    spec: {containers: [{name: o, image: ollama/ollama}]}
---
apiVersion: v1
kind: Service
metadata: {name: llm}
spec: {type: TYPE, selector: {app: SELECTED}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: web}
spec: {rules: [{http: {paths: [{backend: {service: {name: BEHIND}}}]}}]}
"""


@pytest.mark.parametrize(
    ("reach", "selected", "behind", "expected"),
    [
        ("LoadBalancer", "ollama", "webui", {"OLLAMA-OPEN"}),
        ("LoadBalancer", "webui", "webui", set()),  # another program's
        ("ClusterIP", "ollama", "webui", set()),
        ("ClusterIP", "ollama", "llm", {"OLLAMA-OPEN"}),
    ],
)
def test_a_pod_is_published_by_the_service_that_selects_it(
    tmp_path, reach, selected, behind, expected
):
    text = (
        POD.replace("TYPE", reach)
        .replace("SELECTED", selected)
        .replace("BEHIND", behind)
    )
    assert rules(tmp_path, text, "ollama.yaml") == expected


def test_the_command_that_starts_the_program_is_checked(tmp_path):
    text = (
        "containers:\n- image: vllm/vllm-openai\n"
        "  command: [sh, -c, 'pip install x && vllm serve m --host 10.0.0.1 --api-key k']\n"
    )
    assert rules(tmp_path, text, "pod.yaml") == {"VLLM-KEY-FOR-SOME-ROUTES"}


def test_secrets_are_not_repeated(tmp_path):
    (tmp_path / "run.sh").write_text(
        "vllm serve m --api-key s3cret "
        """--kv-transfer-config '{"kv_connector": "XConnector", "token": "s3cret"}'"""
    )
    checked = configs.check([tmp_path])
    assert len(checked.findings) == 2
    assert "s3cret" not in str(checked.to_dict()) + as_text(checked)


def test_outputs_are_recognised_by_name(tmp_path):
    names = {
        "attentions": "SERVED-MAPS",
        "attention_probs": "SERVED-MAPS",
        "attentions.3": "SERVED-MAPS",
        "attention_mask": None,
        "hidden_states_4": "SERVED-STATES",
        "token_embeddings": "SERVED-STATES",
        "embedding": "SERVED-EMBEDDING",
        "past_key_values": "SERVED-CACHE",
        "label": None,
        "probability": None,
        "key": None,
    }
    for name, rule in names.items():
        text = f'output [ {{ name: "{name}" }} ]'
        assert rules(tmp_path, text, "config.pbtxt") == ({rule} if rule else set()), (
            name
        )


def test_words_keep_their_lines():
    text = "a 'b\nc' \\\n d # e\nf=\"g $h\" | i;j"
    assert simple_commands(text) == [
        [Word("a", 1), Word("b\nc", 1), Word("d", 3)],
        [Word("f=g $h", 4)],
        [Word("i", 4)],
        [Word("j", 4)],
    ]
