"""A TARGET as people write it on a command line: a file, a server's address, or `demo`."""

from __future__ import annotations

from urllib.parse import urlsplit

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.oracle.connection import expect_authorized, names_address, without_password
from keyhole.oracle.http import Limits
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import load, plant

DEMO = "demo"


def demo() -> dict[str, Oracle]:
    """The target that ships with Keyhole: one planted endpoint for every kind of answer."""
    seed = 2601
    return {
        "the scoring head": plant("head", dim=64, rank=8, seed=seed),
        "the scorer with four heads": plant("multi-head", dim=32, heads=4, rank=8, seed=seed),
        "the one-layer Transformer": plant("one-layer", dim=16, width=32, seed=seed),
        "the attention layer, last token": plant("attention", dim=64, seed=seed),
        "the attention layer, every token": plant(
            "attention", dim=64, every_token=True, causal=True, seed=seed
        ),
        "the attention layer, every token, no mask": plant(
            "attention", dim=16, every_token=True, seed=seed
        ),
    }


def open_target(
    name: str,
    limits: Limits | None = None,
    *,
    options: EndpointOptions | None = None,
    authorized: bool = False,
) -> Oracle:
    """The oracle that `name` stands for; of the demo, its scoring head.

    `limits` bounds what a server may cost and `options` say how it is asked, for which one must be
    `authorized` where it is another machine; a file and the demo need none of them.
    """
    options = options or EndpointOptions()
    if names_address(name):
        base, model = parts_of(name)
        expect_authorized(name, authorized)
        return OpenInference(base, model, limits=limits, options=options)
    options.expect_none(name)
    return demo()["the scoring head"] if name == DEMO else load(name)


def open_surfaces(
    name: str, options: EndpointOptions | None = None, *, authorized: bool = False
) -> dict[str, Oracle]:
    """Every endpoint of the target, by name; one alone has none."""
    if name == DEMO:
        (options or EndpointOptions()).expect_none(name)
        return demo()
    return {"": open_target(name, options=options, authorized=authorized)}


def parts_of(address: str) -> tuple[str, str]:
    """The server and the model that http://host:port/v2/models/NAME names."""
    public = without_password(address)
    base, mark, model = address.partition("/v2/models/")
    model = model.strip("/")
    if "?" in public or "#" in public:
        # Not shown: it may hold a secret, which has no place in identities and ledgers.
        start = public.partition("?")[0].partition("#")[0]
        raise InputError(
            f"expected an address without ? and #, got {start} with more: use --header"
        )
    if not mark or not model:
        raise InputError(f"expected http://host:port/v2/models/NAME, got {public}")
    return base, model


def describe(name: str, surfaces: dict[str, Oracle]) -> str:
    """What the target is, in words a report can open with."""
    if name == DEMO:
        return "the planted endpoints and the classifier that ship with Keyhole"
    if not surfaces:
        return without_password(name)
    oracle = surfaces[""]
    layer, kind = oracle, None
    while kind is None and layer is not None:  # behind degraded answers
        layer, kind = getattr(layer, "inner", None), getattr(layer, "kind", None)
    if kind:
        return f"planted {kind}, d = {oracle.dim} ({name})"
    public, note = without_password(name), getattr(oracle, "note", "")
    about = f"{public}; {note}" if note else public
    return f"{urlsplit(public).path.rsplit('/', 1)[-1]}, d = {oracle.dim} ({about})"
