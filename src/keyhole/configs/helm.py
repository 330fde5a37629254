"""Values of Helm charts, also as Argo CD and Flux hold them: what each makes of a container.

A chart puts together what several files of values say, so a file alone tells little of what is
missing. A server counts as reached by others only where the file publishes it (a load balancer, a
node's port, an ingress), and no key is missed where one, or a secret, is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from keyhole.configs.command import Command, Word, inner_scripts
from keyhole.configs.containers import (
    OUTSIDE,
    Mapping,
    Node,
    Scalar,
    documents,
    environment,
    walk,
    words_of,
)

# What a chart of this name starts, if its values name no other image.
_CHARTS = {
    "chroma": "chromadb/chroma", "chromadb": "chromadb/chroma", "milvus": "milvusdb/milvus",
    "ollama": "ollama/ollama", "qdrant": "qdrant/qdrant", "sglang": "lmsysorg/sglang",
    "tei": "huggingface/text-embeddings-inference",
    "text-embeddings-inference": "huggingface/text-embeddings-inference",
    "text-generation-inference": "huggingface/text-generation-inference",
    "tgi": "huggingface/text-generation-inference", "vllm": "vllm/vllm-openai",
    "weaviate": "semitechnologies/weaviate",
}  # fmt: skip
_OF_A_CHART = {
    "image", "service", "ingress", "persistence", "persistentVolume", "resources", "replicaCount",
    "enabled",
}  # fmt: skip
_OF_OLLAMA = {"gpu", "models", "defaultModel", "insecure", "mountPath"}  # of its chart's `ollama`
_ARGS = re.compile(r"(\w*[a-z_])?args|command", re.IGNORECASE)
_ENV = ("env", "environment", "extraEnv", "extraEnvVars", "envVars", "envSecrets")
_KEYS = re.compile(
    r"(vllm|server|read_?only|existing)?_?(api_?keys?|secret)|oidc|auth(entication)?|"
    r"authorizationEnabled",
    re.IGNORECASE,
)
_FROM_ELSEWHERE = re.compile(r"(extra)?env(vars)?(from|secret|cm)", re.IGNORECASE)
_NO = ("", "false", "no", "off", "null", "~", "{}", "[]")


def is_values(path: Path) -> bool:
    return "values" in path.name


def in_helm(root: Node, path: Path) -> Iterator[Command]:
    """The containers that charts make of these values."""
    if not isinstance(root, Mapping):
        return
    if "apiVersion" in root.pairs:
        for chart, values in _releases(root):
            yield from _in_chart(values, chart)
    elif "releases" in root.pairs or is_values(path):
        yield from _in_chart(root, "")


def _releases(root: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Values inside an application of Argo CD or a release of Flux, with the chart's name."""
    for node in walk(root):
        if not isinstance(node, Mapping):
            continue
        helm, chart = node.mapping("helm"), node.scalar("chart")
        if helm is not None and chart is not None:  # Argo CD
            values = helm.mapping("valuesObject") or _embedded(helm.scalar("values"))
            if values is not None:
                yield chart.text, values
        inner, flux = node.mapping("values"), node.mapping("chart")
        if inner is not None and flux is not None:  # Flux
            spec = flux.mapping("spec")
            name = None if spec is None else spec.scalar("chart")
            yield "" if name is None else name.text, inner


def _embedded(text: Scalar | None) -> Mapping | None:
    """Values that stand in a text; their lines are counted from its first."""
    root = next(iter(inside(text)), None) if text is not None else None
    return root if isinstance(root, Mapping) else None


def inside(text: Scalar) -> list[Node]:
    """The documents of a text inside another document, or none."""
    try:
        return documents("\n" * (text.line - 1) + text.text)
    except ValueError:
        return []


def _in_chart(root: Mapping, chart: str) -> Iterator[Command]:
    found = list(_containers(root))
    if not found and (image := _CHARTS.get(chart.rpartition("/")[2])):
        found = [(root, Word(image, root.line))]
    names = {id(value): name for name, value in _pairs(root)}
    for node, image in found:
        # Of a chart within the chart, only its own service says who reaches it.
        own = (
            _has_service(node)
            or names.get(id(node), "").lower() in _CHARTS
            or "enabled" in node.pairs
        )
        around = node if own else root
        published = _published(around)
        command = Command(
            tuple(_words(node)), environment(node, _ENV), image, published is None,
            published=published, cluster=True,
            external_env=_keyed(node) or _keyed(around) or _guarded(around),
        )  # fmt: skip
        yield from inner_scripts(command) or [command]


def _containers(root: Mapping) -> Iterator[tuple[Mapping, Word]]:
    """Mappings that a chart makes a container of, with its image."""
    seen = set[int]()
    for node in walk(root):
        if not isinstance(node, Mapping) or id(node) in seen or _off(node):
            continue
        seen.add(id(node))
        if image := _image(node):
            seen |= (
                {id(part) for part in walk(node.pairs["image"])} if "image" in node.pairs else set()
            )
            yield node, image
            continue
        for name, value in node.pairs.items():
            known = _CHARTS.get(name.lower())
            if known is None or not isinstance(value, Mapping) or _off(value):
                continue
            if _image(value):
                continue  # found when it is reached itself
            if set(value.pairs) & (_OF_A_CHART - {"enabled"}) or value.scalar("enabled"):
                yield value, Word(known, value.line)
            elif name == "ollama" and set(value.pairs) & _OF_OLLAMA:
                yield node, Word(known, value.line)


def _off(node: Mapping) -> bool:
    enabled = node.scalar("enabled")
    return enabled is not None and enabled.text.lower() in _NO


def _image(node: Mapping) -> Word | None:
    """The image of a container, put together as charts do."""
    image = node.mapping("image")
    if image is not None and (every := image.mapping("all")):  # Milvus
        image = every
    if image is None and node.scalar("tag"):  # the stack of vLLM
        image = node
    if image is None:
        return None
    name = image.scalar("repository") or image.scalar("repo") or image.scalar("name")
    if name is None:
        return None
    tag = image.scalar("tag")
    return Word(f"{name.text}:{tag.text}" if tag and tag.text else name.text, name.line)


def _words(node: Mapping) -> Iterator[Word]:
    """Arguments, of the container or of a group of settings in it."""
    for around in (node, *(part for part in node.pairs.values() if isinstance(part, Mapping))):
        for name, value in around.pairs.items():
            if _ARGS.fullmatch(name):
                yield from words_of(value)


def _has_service(node: Mapping) -> bool:
    return bool({"service", "ingress", "serviceType"} & set(node.pairs))


def _published(node: Mapping) -> Word | None:
    """The setting that lets others than the cluster in; charts within it have their own."""
    router = node.mapping("routerSpec")  # of the stack of vLLM
    for part in (node, *([] if router is None else [router])):
        service, ingress = part.mapping("service"), part.mapping("ingress")
        reach = part.scalar("serviceType") or (None if service is None else service.scalar("type"))
        if reach is not None and reach.text in OUTSIDE:
            return Word(f"service type {reach.text}", reach.line)
        enabled = None if ingress is None else ingress.scalar("enabled")
        if enabled is not None and enabled.text.lower() not in _NO:
            return Word("ingress enabled", enabled.line)
        network = part.scalar("hostNetwork")
        if network is not None and network.text.lower() not in _NO:
            return Word("hostNetwork", network.line)
    return None


def _pairs(node: Node) -> list[tuple[str, Node]]:
    """Every name in a document with its value."""
    return [pair for part in walk(node) if isinstance(part, Mapping) for pair in part.pairs.items()]


def in_cluster_only(node: Mapping) -> bool:
    """Whether values say that only the cluster reaches the service."""
    service = node.mapping("service")
    reach = None if service is None else service.scalar("type")
    return reach is not None and reach.text == "ClusterIP" and _published(node) is None


def _keyed(node: Mapping) -> bool:
    """Whether a key, a login or a secret is named somewhere in the values, or a file in them."""
    pairs = _pairs(node)
    named = any(
        _set(value)
        for name, value in pairs
        if _KEYS.fullmatch(name) or _FROM_ELSEWHERE.fullmatch(name)
    )
    return named or any(
        _keyed(root)
        for name, value in pairs
        if isinstance(value, Scalar) and name.endswith((".yaml", ".yml"))
        for root in inside(value)
        if isinstance(root, Mapping)
    )


def _guarded(node: Mapping) -> bool:
    """Whether an ingress asks who is there, or a policy says who may connect."""
    for part in walk(node):
        if not isinstance(part, Mapping):
            continue
        policy = part.mapping("networkPolicy")
        if policy is not None and not _off(policy) and policy.scalar("enabled"):
            return True
        notes = part.mapping("annotations")
        if notes is not None and any(
            re.search(
                r"auth-(type|url|secret|signin|tls)|middlewares|whitelist-source-range|allowlist",
                name,
            )
            for name in notes.pairs
        ):
            return True
    return False


def _set(value: Node) -> bool:
    if isinstance(value, Scalar):
        return value.text.lower() not in _NO
    if isinstance(value, Mapping):
        return bool(value.pairs) and not _off(value)
    return bool(value.items)
