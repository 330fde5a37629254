"""Containers that Helm charts make of their values, also as Argo CD and Flux hold them.

`in_helm` takes a file of values and yields the commands that its containers would run
(command.py).

A chart joins the values of several files, so what is missing in one may be in another.
A server counts as reached by others only if the file publishes it (a load balancer, a
port of the node, an ingress). An API key counts as missing only if the file names
neither a key nor a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from keyhole.configs.command import Command, Word, inner_scripts
from keyhole.configs.containers import OUTSIDE, environment, words_of
from keyhole.configs.tree import Mapping, Node, Scalar, documents, walk

# The image of a chart, if its values name none.
_CHARTS = {
    "chroma": "chromadb/chroma",
    "chromadb": "chromadb/chroma",
    "milvus": "milvusdb/milvus",
    "ollama": "ollama/ollama",
    "qdrant": "qdrant/qdrant",
    "sglang": "lmsysorg/sglang",
    "tei": "huggingface/text-embeddings-inference",
    "text-embeddings-inference": "huggingface/text-embeddings-inference",
    "text-generation-inference": "huggingface/text-generation-inference",
    "tgi": "huggingface/text-generation-inference",
    "vllm": "vllm/vllm-openai",
    "weaviate": "semitechnologies/weaviate",
}
_CHART_SETTINGS = {  # a mapping with one of them is a chart's values
    "image",
    "service",
    "ingress",
    "persistence",
    "persistentVolume",
    "resources",
    "replicaCount",
}
_OLLAMA_SETTINGS = {
    "gpu",
    "models",
    "defaultModel",
    "insecure",
    "mountPath",
}  # under `ollama`
_ARGS = re.compile(r"(\w*[a-z_])?args|command", re.IGNORECASE)
_ENV = ("env", "environment", "extraEnv", "extraEnvVars", "envVars", "envSecrets")
_SECRETS = re.compile(  # an API key, a login, or variables from elsewhere
    r"(vllm|server|read_?only|existing)?_?(api_?keys?|secret)|oidc|auth(entication)?|"
    r"authorizationEnabled|(extra)?env(vars)?(from|secret|cm)",
    re.IGNORECASE,
)
# annotations of an ingress that asks for a login or limits the addresses
_GUARDS = re.compile(
    r"auth-(type|url|secret|signin|tls)|middlewares|whitelist-source-range|allowlist"
)
_NO = ("", "false", "no", "off", "null", "~", "{}", "[]")


def is_values(path: Path) -> bool:
    return "values" in path.name


def in_helm(root: Node, path: Path) -> Iterator[Command]:
    """Yield the commands of the containers that charts make of these values."""
    if not isinstance(root, Mapping):
        return
    if "apiVersion" in root.pairs:
        for chart, values in _releases(root):
            yield from _in_chart(values, chart)
    elif "releases" in root.pairs or is_values(path):
        yield from _in_chart(root, "")


def _releases(root: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Yield the chart's name and the values of each application of Argo CD or release of Flux."""
    for node in _mappings(root):
        chart = node.scalar("chart")
        helm = node.mapping("helm")
        if chart is not None and helm is not None:  # Argo CD
            text = helm.scalar("values")
            embedded = next(iter(inside(text)), None) if text is not None else None
            values = helm.mapping("valuesObject") or embedded
            if isinstance(values, Mapping):
                yield chart.text, values
        values = node.mapping("values")
        if values is not None and node.mapping("chart"):  # Flux
            name = node.scalar("chart", "spec", "chart")
            yield "" if name is None else name.text, values


def inside(text: Scalar) -> list[Node]:
    """Return the documents in a text of another document, with line numbers of the outer file."""
    try:
        return documents("\n" * (text.line - 1) + text.text)
    except ValueError:
        return []


def _mappings(root: Node) -> Iterator[Mapping]:
    return (node for node in walk(root) if isinstance(node, Mapping))


def _in_chart(root: Mapping, chart: str) -> Iterator[Command]:
    """Yield the commands of the containers that a chart makes of its values."""
    found = list(_containers(root))
    if not found and (image := _CHARTS.get(chart.rpartition("/")[2])):
        found = [(root, Word(image, root.line))]
    names = {id(value): name for name, value in _pairs(root)}
    for node, image in found:
        # A chart within the chart is published by its own service alone.
        is_chart = (
            bool({"service", "ingress", "serviceType", "enabled"} & set(node.pairs))
            or names.get(id(node), "").lower() in _CHARTS
        )
        around = node if is_chart else root
        published = _published(around)
        words = [
            word
            for group in (node, *node.pairs.values())
            if isinstance(group, Mapping)
            for key, value in group.pairs.items()
            if _ARGS.fullmatch(key)
            for word in words_of(value)
        ]
        yield from inner_scripts(
            Command(
                tuple(words),
                environment(node, _ENV),
                image,
                local=published is None,
                published=published,
                cluster=True,
                external_env=_has_secret(node)
                or _has_secret(around)
                or _guarded(around),
            )
        )


def _containers(root: Mapping) -> Iterator[tuple[Mapping, Word]]:
    """Yield the mappings that a chart makes a container of, with its image."""
    in_images = set[int]()
    for node in _mappings(root):
        if id(node) in in_images or _off(node):
            continue
        if image := _image(node):
            if "image" in node.pairs:
                in_images |= set(map(id, walk(node.pairs["image"])))
            yield node, image
            continue
        for key, value in node.pairs.items():
            known = _CHARTS.get(key.lower())
            if (
                known is None
                or not isinstance(value, Mapping)
                or _off(value)
                or _image(value)
            ):
                continue  # a mapping with an image is found by itself
            if _CHART_SETTINGS & set(value.pairs) or value.scalar("enabled"):
                yield value, Word(known, value.line)
            elif key == "ollama" and _OLLAMA_SETTINGS & set(value.pairs):
                yield node, Word(known, value.line)  # `node` is the chart


def _image(node: Mapping) -> Word | None:
    """Return the image of a container, joined from its parts as charts do."""
    image = node.mapping("image", "all") or node.mapping(
        "image"
    )  # the former in Milvus's chart
    if image is None and node.scalar("tag"):  # in the stack of vLLM
        image = node
    if image is None:
        return None
    name = image.scalar("repository") or image.scalar("repo") or image.scalar("name")
    if name is None:
        return None
    tag = image.scalar("tag")
    return Word(f"{name.text}:{tag.text}" if tag and tag.text else name.text, name.line)


def _published(node: Mapping) -> Word | None:
    """Return the setting that lets clients outside the cluster in."""
    for part in (node, node.mapping("routerSpec")):  # the latter in the stack of vLLM
        if part is None:
            continue
        reach = part.scalar("serviceType") or part.scalar("service", "type")
        if reach is not None and reach.text in OUTSIDE:
            return Word(f"service type {reach.text}", reach.line)
        for setting, path in (
            ("ingress enabled", ("ingress", "enabled")),
            ("hostNetwork", ("hostNetwork",)),
        ):
            given = part.scalar(*path)
            if given is not None and _is_set(given):
                return Word(setting, given.line)
    return None


def in_cluster_only(node: Mapping) -> bool:
    """Return whether values say that only the cluster reaches the service."""
    reach = node.scalar("service", "type")
    return reach is not None and reach.text == "ClusterIP" and _published(node) is None


def _pairs(root: Node) -> Iterator[tuple[str, Node]]:
    return (pair for node in _mappings(root) for pair in node.pairs.items())


def _has_secret(node: Mapping) -> bool:
    """Return whether the values, or a file in them, name a key, a login or a secret."""
    return any(
        (_SECRETS.fullmatch(key) and _is_set(value))
        or (
            isinstance(value, Scalar)
            and key.endswith((".yaml", ".yml"))
            and any(
                _has_secret(root) for root in inside(value) if isinstance(root, Mapping)
            )
        )
        for key, value in _pairs(node)
    )


def _guarded(root: Mapping) -> bool:
    """Return whether an ingress asks for a login, or a policy limits who may connect."""
    for node in _mappings(root):
        policy = node.scalar("networkPolicy", "enabled")
        notes = node.mapping("annotations")
        if policy is not None and _is_set(policy):
            return True
        if notes is not None and any(map(_GUARDS.search, notes.pairs)):
            return True
    return False


def _off(node: Mapping) -> bool:
    enabled = node.scalar("enabled")
    return enabled is not None and not _is_set(enabled)


def _is_set(value: Node) -> bool:
    """Return whether a setting is given and does not say no."""
    if isinstance(value, Scalar):
        return value.text.lower() not in _NO
    if isinstance(value, Mapping):
        return bool(value.pairs) and not _off(value)
    return bool(value.items)
