"""`keyhole audit` as a function: every attack that applies to a target, judged, as findings.

Findings in, page out, nothing global. A family of exposures is a function that takes an endpoint or
a model and gives checks to make (check.py), each of which gives findings and skips; to add an
attack, see the registry of its package.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from keyhole.audit import answers as answer_checks
from keyhole.audit import defences as defence_checks
from keyhole.audit import flips as flip_checks
from keyhole.audit import gradients as gradient_checks
from keyhole.audit import inputs, weights
from keyhole.audit import leaks as leak_checks
from keyhole.audit import servers as server_checks
from keyhole.audit import stores as store_checks
from keyhole.audit import texts as text_checks
from keyhole.audit.check import Check
from keyhole.audit.given import TEXTS_OF_A_MODEL, TEXTS_OF_A_STORE, Data, Stored
from keyhole.audit.journal import Resuming, make_all, opened_journal
from keyhole.audit.stores import StoreTarget
from keyhole.audit.targets import Target, open_target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.bounds import expect_count, expect_seed
from keyhole.devices import expect_device
from keyhole.disrupt.workers import MOST_PROCESSES, Pool, cluster
from keyhole.errors import InputError
from keyhole.models.loading import names_model
from keyhole.oracle import Oracle
from keyhole.oracle.options import EndpointOptions
from keyhole.oracle.session import Notice, session, unheard
from keyhole.progress import Track, untracked
from keyhole.results import Audit, environment
from keyhole.stores import names_store
from keyhole.threads import threads_for

ENDPOINTS = (weights.checks, inputs.checks)
MODELS = (text_checks.checks, gradient_checks.checks, flip_checks.checks)
STORES = (store_checks.checks,)
LEAKS = (leak_checks.checks,)
SERVERS = (server_checks.checks,)
ANSWERS = (answer_checks.checks,)


def audit(
    target: str | Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget | Target,
    *,
    model: str | Sequence[str] | None = None,
    known: str | Path | None = None,
    corpus: str | Path | None = None,
    data: str | Path | None = None,
    texts: int | None = None,
    flips: int = 12,
    column: str | None = None,
    label: str | None = None,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    processes: int = 0,
    dask: str | None = None,
    ledger: str | Path | None = None,
    journal: str | Path | None = None,
    force: bool = False,
    authorized: bool = False,
    against_defences: bool = False,
    seed: int = 0,
    track: Track = untracked,
    resuming: Resuming = lambda done, total: None,  # noqa: ARG005
    endpoint: EndpointOptions | None = None,
    notice: Notice = unheard,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's folder or name, a
    vector store), or an oracle, several by name, or a model with its texts. A store is read with
    `model`, the encoder that made its vectors, or several that may have made them: `texts` of them,
    20 by default, chosen by `seed`; `known` is a file of texts that are in it, `corpus` one of
    texts like them, which is counted. `data` is a file of texts for a model:
    the first `texts` of its `column`, 3 by default, are read back, and the first `flips` flipped,
    whose right classes are in the column `label`: by default the one of that name, if there is one,
    or else the model's own answers count as right. `layers` overrides which layers are looked at.
    `processes` reads a store's vectors in so many of them, 0 in this one, `dask` on the cluster at
    that address. `ledger` remembers what endpoints answered. `journal` is the file that remembers
    finished checks, from which an audit that was stopped goes on (`resuming` is told so); remove it
    once the findings are saved. Another audit's journal is refused, or replaced with `force`.
    `authorized` says that a server which is not this machine may be asked, `endpoint` how it is;
    `notice` is told what a person should know at once. `against_defences` puts defences in front of
    every endpoint and model besides, and attacks those.
    """
    started = time.perf_counter()
    expect_seed(seed)
    expect_count("--texts", texts)
    expect_count("--flips", flips)
    expect_device(device)
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    if isinstance(target, str):
        if ledger is not None and names_store(target):
            raise _no_endpoint(f"the vector store {target}")
        if ledger is not None and names_model(target):
            raise _no_endpoint(f"the model {target}")
        given = None
        if data is not None:
            given = Data(data, texts or TEXTS_OF_A_MODEL, flips, column, label)
        stored = Stored(model, texts or TEXTS_OF_A_STORE, known, seed, corpus)
        opened = open_target(
            target, data=given, layers=layers, device=device, stored=stored,
            authorized=authorized, endpoint=endpoint,
        )  # fmt: skip
    else:
        opened = target_of(target)
    if ledger is not None and not opened.surfaces:
        raise _no_endpoint(f"the {'vector store' if opened.stores else 'model'} {opened.name}")
    if (processes or dask is not None) and not opened.stores:
        name = opened.name or "an endpoint"
        raise InputError(f"expected --processes and --dask with a vector store, got {name}")
    opening = time.perf_counter() - started
    with (
        session(opened.surfaces, ledger=ledger, notice=notice) as surfaces,
        opened_journal(journal, opened, seed, force=force) as memory,
        _workers(processes, dask) as pool,
        threads_for(opened.largest_matrix),
    ):
        checks = _checks(surfaces, opened, seed, against_defences)
        checked, seconds = make_all(checks, memory, track, resuming, pool)
        machine = environment()  # with as many threads as this took
    skips = checked.skips
    if len(opened.surfaces) + len(opened.models) > 1:
        # What one part of the target does not give, another does.
        skips = tuple(skip for skip in skips if skip.unchecked)
    return Audit(
        target=opened.name or opened.identity,
        identity=opened.identity,
        findings=store_checks.whole(opened.stores, checked.findings),
        skips=(*opened.skips, *skips),
        seed=seed,
        seconds=opening + seconds,
        environment=machine,
    )


@contextmanager
def _workers(processes: int, dask: str | None) -> Generator[Pool | None]:
    """Who makes checks besides this process; None where nobody does."""
    if not processes and dask is None:
        yield None
        return
    with cluster(dask) as (executor, size), Pool(executor, size or processes) as pool:
        yield pool


def _no_endpoint(what: str) -> InputError:
    return InputError(
        f"expected --ledger with an endpoint, whose answers it keeps, got {what}: "
        "leave --ledger out"
    )


def _checks(
    surfaces: Mapping[str, Oracle], opened: Target, seed: int, against_defences: bool
) -> list[Check]:
    """In the order of the findings, each under a name that says of which part it is."""
    parts = [
        *((name, family(name, oracle, seed)) for name, oracle in surfaces.items()
          for family in ENDPOINTS),
        *((name, family(name, model, seed)) for name, model in opened.models.items()
          for family in MODELS),
        *((name, family(name, store)) for name, store in opened.stores.items()
          for family in STORES),
        *((name, family(name, leaks)) for name, leaks in opened.leaks.items()
          for family in LEAKS),
        *((name, family(name, server)) for name, server in opened.servers.items()
          for family in SERVERS),
        *((name, family(name, answers)) for name, answers in opened.answers.items()
          for family in ANSWERS),
    ]  # fmt: skip
    if against_defences:  # last, so that a journal's numbers stay what they were without them
        parts += [
            *((name, defence_checks.endpoint_checks(name, oracle, seed))
              for name, oracle in surfaces.items()),
            *((name, defence_checks.model_checks(name, model, seed))
              for name, model in opened.models.items()),
        ]  # fmt: skip
    several = len(surfaces) + len(opened.models) + len(opened.stores) > 1
    return [
        replace(check, name=f"{name}: {check.name}" if several else check.name)
        for name, checks in parts
        for check in checks
    ]
