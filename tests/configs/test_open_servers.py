"""Forms of open servers that configurations have: each is found, and its closed twin is not."""

from __future__ import annotations

import pytest

from keyhole import configs


def exit_code(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return configs.check([path]).exit_code()


def compose(image, *lines):
    settings = "".join(f"    {line}\n" for line in (f"image: {image}", *lines))
    return f"services:\n  s:\n{settings}"


POD = """apiVersion: v1
kind: Pod
metadata: {name: vllm, labels: {app: vllm}}
spec: {containers: [{image: vllm/vllm-openai, args: [--model, m]}]}
"""
SERVICE = """apiVersion: v1
kind: Service
metadata: {name: vllm}
spec: {type: LoadBalancer, selector: {app: vllm}}
"""


def policy(spec):
    return f"""---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{name: policy}}
spec: {spec}
"""


def listed(*objects):
    items = "".join(
        "- " + each.strip().replace("\n", "\n  ") + "\n" for each in objects
    )
    return f"apiVersion: v1\nkind: List\nitems:\n{items}"


BASE = (
    "x-base: &base {image: ollama/ollama}\nx-ports: &ports {ports: ['11434:11434']}\n"
)
SHARED = """services:
  vpn: {image: vpn, ports: ['%s:8000']}
  vllm: {image: vllm/vllm-openai, command: --model m, network_mode: 'service:vpn'}
"""
VLLM = ("vllm/vllm-openai", "ports: ['8000:8000']")
OPEN = [
    # Names of variables that only contain "arg" or "opt"
    ("run.sh", "vllm serve $LARGE_MODEL --host 0.0.0.0"),
    ("run.sh", "vllm serve ${TARGET} --host 0.0.0.0"),
    ("run.sh", "vllm serve $CARGO_HOME --host 0.0.0.0"),
    ("run.sh", "vllm serve $OPTIMIZED_MODEL --host 0.0.0.0"),
    # Empty keys
    ("run.sh", 'vllm serve m --api-key ""'),
    ("run.sh", "vllm serve m --api-key="),
    ("run.sh", "vllm serve m --api-key --max-model-len 10"),
    ("run.sh", "VLLM_API_KEY= vllm serve m"),
    ("run.sh", "sglang serve --host 0.0.0.0 --api-key ''"),
    ("run.sh", "docker run -e VLLM_API_KEY= -p 8000:8000 vllm/vllm-openai --model m"),
    ("run.sh", "docker run -e QDRANT__SERVICE__API_KEY= qdrant/qdrant"),
    ("compose.yml", compose(*VLLM, 'environment: {VLLM_API_KEY: ""}')),
    ("compose.yml", compose(*VLLM, "environment: [VLLM_API_KEY=]")),
    (
        "compose.yml",
        compose(
            "qdrant/qdrant",
            "ports: ['6333:6333']",
            'environment: {QDRANT__SERVICE__API_KEY: ""}',
        ),
    ),
    # Options of `docker run`
    ("run.sh", "docker run --network host ollama/ollama"),
    ("run.sh", "docker run -d --net host ollama/ollama"),
    ("run.sh", "docker run --publish=11434:11434 ollama/ollama"),
    ("run.sh", "docker run -dp 11434:11434 ollama/ollama"),
    ("run.sh", "docker run -itp11434:11434 ollama/ollama"),
    ("run.sh", "docker run --env=OLLAMA_HOST=0.0.0.0 ollama/ollama"),
    (
        "run.sh",
        "docker run --rm -p 127.0.0.1:8000:8000 --network host vllm/vllm-openai --model m",
    ),
    # Compose
    ("compose.yml", f"{BASE}services:\n  s:\n    <<: [*base, *ports]\n"),
    ("compose.yml", SHARED % "8000"),
    ("compose.yml", compose(*VLLM).encode("utf-16")),
    ("compose.yml", b"\xfe\xff" + compose(*VLLM).encode("utf-16-be")),
    # Kubernetes
    ("pod.yaml", POD + policy("{podSelector: {matchLabels: {app: db}}}")),
    ("pod.yaml", POD + policy("{podSelector: {}, policyTypes: [Egress]}")),
    (
        "pod.yaml",
        POD
        + policy(
            "{podSelector: {matchExpressions: [{key: app, operator: DoesNotExist}]}}"
        ),
    ),
    ("pod.yaml", listed(POD.replace("vllm/vllm-openai", "ollama/ollama"), SERVICE)),
    # Units
    ("a.service", "[Service]\nExecStart = /usr/bin/vllm serve m --host 0.0.0.0\n"),
    ("a.container", "[Container]\nImage = ollama/ollama\nPublishPort = 11434:11434\n"),
    # Dockerfiles
    ("Dockerfile", "FROM python\nCMD cd /app && vllm serve m --host 0.0.0.0\n"),
    ("Dockerfile", "FROM python\nENTRYPOINT HF_HOME=/m exec vllm serve m\n"),
    ("Dockerfile", 'FROM vllm/vllm-openai AS base\nFROM base\nCMD ["--model", "m"]\n'),
    (
        "Dockerfile",
        'FROM vllm/vllm-openai as Base\nCMD ["--model", "m"]\nFROM x\nFROM base\n',
    ),
    # Prefixes of commands
    ("run.sh", "sudo -E vllm serve m --host 0.0.0.0"),
    ("run.sh", "sudo -Eu ml HF_HOME=/m vllm serve m"),
    ("run.sh", "sudo -u ml /opt/bin/llama-server --host 0.0.0.0"),
    ("run.sh", "sudo bash -lc 'sudo --user ml -E vllm serve m'"),
    ("run.sh", "env -u VLLM_API_KEY vllm serve m"),
    # Variables that the file sets, and defaults
    ("run.sh", "HOST=0.0.0.0\nllama-server -m m --host $HOST"),
    ("run.sh", 'HOST=${1:-0.0.0.0}\nllama-server -m m --host "$HOST"'),
    ("run.sh", "llama-server -m m --host ${HOST:-0.0.0.0}"),
    ("run.sh", "export HOST=${HOST:-0.0.0.0}\nllama-server -m m --host $HOST"),
    ("run.sh", "HOST=\nllama-server -m m --host ${HOST-0.0.0.0}"),
    ("run.sh", "vllm serve m --host localhost --max-logprobs ${N:-100}"),
    (
        "compose.yml",
        compose(
            "ollama/ollama",
            'environment: ["OLLAMA_HOST=${OLLAMA_HOST:-0.0.0.0}"]',
            "ports: ['1:1']",
        ),
    ),
    ("compose.yml", compose(VLLM[0], "ports: ['${BIND:-0.0.0.0}:8000:8000']")),
]
CLOSED = [
    ("run.sh", "vllm serve m $EXTRA_ARGS"),
    ("run.sh", "vllm serve m ${extraArgs}"),
    ("run.sh", "vllm serve m $VLLM_OPTS_2"),
    ("run.sh", "vllm serve m --api-key $KEY"),
    ("run.sh", "VLLM_API_KEY=k vllm serve m --api-key ''"),
    (
        "run.sh",
        "docker run --env=VLLM_API_KEY=k -p 8000:8000 vllm/vllm-openai --model m",
    ),
    ("run.sh", "docker run -de VLLM_API_KEY=k vllm/vllm-openai --model m"),
    ("run.sh", "docker run --publish=127.0.0.1:11434:11434 ollama/ollama"),
    ("run.sh", "docker run -dp 127.0.0.1:11434:11434 ollama/ollama"),
    ("run.sh", "docker run --volume=./q:/qdrant/config qdrant/qdrant"),
    (
        "run.sh",
        "docker run --network net -p 127.0.0.1:8000:8000 vllm/vllm-openai -tp 4",
    ),
    ("compose.yml", compose(*VLLM, "environment: {VLLM_API_KEY: }")),
    ("compose.yml", compose(*VLLM, "environment: [VLLM_API_KEY]")),
    (
        "compose.yml",
        compose("ollama/ollama", 'environment: {OLLAMA_HOST: ""}', "ports: ['1:1']"),
    ),
    ("compose.yml", f"{BASE}services:\n  s:\n    <<: [*base, *base]\n"),
    (
        "compose.yml",
        "services:\n  s:\n    <<: [{image: a}, {image: qdrant/qdrant}]\n    ports: [1]",
    ),
    ("compose.yml", SHARED % "127.0.0.1:8000"),
    (
        "compose.yml",
        "services: {a: {image: vllm/vllm-openai, network_mode: 'service:a'}}",
    ),
    ("pod.yaml", POD + policy("{podSelector: {}}")),
    (
        "pod.yaml",
        POD
        + policy("{podSelector: {matchLabels: {app: vllm}}, policyTypes: [Ingress]}"),
    ),
    (
        "pod.yaml",
        POD
        + policy(
            "{podSelector: {matchExpressions: [{key: app, operator: In, values: [vllm]}]}}"
        ),
    ),
    ("pod.yaml", listed(POD, policy("{podSelector: {}}").removeprefix("---\n"))),
    ("pod.yaml", "&a {apiVersion: v1, kind: List, items: [*a, vllm]}"),
    (
        "a.container",
        "[Container]\nImage = ollama/ollama\nPublishPort = 127.0.0.1:1:1\n",
    ),
    ("Dockerfile", "FROM python\nCMD cd /app && vllm serve m --api-key $KEY\n"),
    ("Dockerfile", "FROM python\nENV VLLM_API_KEY=k\nCMD cd /app && vllm serve m\n"),
    (
        "Dockerfile",
        'FROM vllm/vllm-openai AS a\nENV VLLM_API_KEY=k\nFROM a\nCMD ["--model", "m"]',
    ),
    (
        "Dockerfile",
        'FROM vllm/vllm-openai AS a\nCMD ["m"]\nFROM python\nCOPY --from=a /x /x\n',
    ),
    ("run.sh", "sudo -u vllm serve m"),
    ("run.sh", "vllm serve m --host 0.0.0.0 --uds /run/vllm.sock"),
    ("run.sh", "vllm serve m --config vllm.yaml"),
    ("run.sh", "python -m sglang.launch_server --host 0.0.0.0 --config sglang.yaml"),
    ("run.sh", "./qdrant --config-path qdrant.yaml"),
    ("run.sh", "HOST=127.0.0.1\nvllm serve m --host ${HOST}"),
    ("run.sh", "HOST=${HOST:?name it}\nllama-server -m m --host $HOST"),
    ("run.sh", "A=$B B=$A\nllama-server -m m --host $A"),
    ("run.sh", "HOST=$HOST\nllama-server -m m --host $HOST"),
    ("run.sh", "docker run -p ${BIND:-127.0.0.1}:8000:8000 vllm/vllm-openai --model m"),
    ("compose.yml", compose(VLLM[0], "ports: ['${BIND:-127.0.0.1}:8000:8000']")),
]


@pytest.mark.parametrize(("name", "text"), OPEN)
def test_an_open_server_is_found(tmp_path, name, text):
    assert exit_code(tmp_path, name, text) == 1


@pytest.mark.parametrize(("name", "text"), CLOSED)
def test_a_closed_server_is_not_reported(tmp_path, name, text):
    assert exit_code(tmp_path, name, text) == 0


def test_a_long_variable_named_often_does_not_fill_the_memory(tmp_path):
    script = f"A={'a' * 400_000}\nllama-server --host {'$A' * 50_000}"  # together 20 GB
    assert exit_code(tmp_path, "run.sh", script) == 0


def test_text_of_16_bits_without_a_mark_is_not_passed_over(tmp_path):
    assert exit_code(tmp_path, "compose.yml", compose(*VLLM).encode("utf-16-le")) == 3
