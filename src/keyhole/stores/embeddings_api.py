"""A server that turns texts into embeddings, in the form of OpenAI's `POST /v1/embeddings`.

It keeps no vectors to be read back. It is asked for those of texts that one knows, which tells how
the vectors of its other clients are made (encoder, pooling), and whether they can be read.
The environment's KEYHOLE_API_KEY, if there is one, is sent as the bearer token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.oracle.connection import connected, without_password
from keyhole.oracle.http import Http
from keyhole.oracle.protocol import OracleError
from keyhole.stores.store import Place, Store

_AT_ONCE = 32  # texts in one request


@contextmanager
def open_embeddings_api(place: Place) -> Generator[Store]:
    if not place.known:
        raise InputError(
            f"expected --known with texts to ask {place.path} for, got none: a server of "
            "embeddings keeps no vectors"
        )
    url = place.path.rstrip("/")
    with closing(connected(EndpointOptions(), url, retries=2)) as http:
        url = without_password(url)
        name = place.options.get("model") or _only_model(http, url)
        dim = len(_ask(http, url, name, place.known[:1])[0])

        def vectors(rows: Sequence[int]) -> Tensor:
            wanted = [place.known[row] for row in rows]
            parts = (wanted[start : start + _AT_ONCE] for start in range(0, len(wanted), _AT_ONCE))
            given = [vector for part in parts for vector in _ask(http, url, name, part)]
            if any(len(vector) != dim for vector in given):
                raise OracleError(
                    f"expected vectors of {dim} numbers from {url}, got other lengths"
                )
            return torch.tensor(given, dtype=torch.float64)

        def texts(rows: Sequence[int]) -> list[str | None]:
            return [place.known[row] for row in rows]

        note = "the texts of --known, asked for now"
        yield Store(url, len(place.known), dim, vectors, texts, note)


def _only_model(http: Http, url: str) -> str:
    """The model that a server has, where it says so and has one alone."""
    try:
        listed = http.request("GET", f"{url.removesuffix('/embeddings')}/models").get("data")
    except OracleError:  # not every server lists its models, nor needs a name
        return "default"
    entries = cast("list[Any]", listed) if isinstance(listed, list) else []
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
    if len(names) > 1:
        raise InputError(
            f"expected one model at {url}, got {', '.join(names[:5])}: add ?model=NAME"
        )
    return names[0] if names else "default"


def _ask(http: Http, url: str, model: str, texts: Sequence[str]) -> list[list[float]]:
    content = {"model": model, "input": list(texts), "encoding_format": "float"}
    answer = http.request("POST", url, content)
    try:
        entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
        given = [[float(number) for number in entry["embedding"]] for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise OracleError(
            f"expected data with an embedding for each text from {url}, got {error!r:.80}"
        ) from error
    if len(given) != len(texts):
        raise OracleError(f"expected {len(texts)} embeddings from {url}, got {len(given)}")
    return given
