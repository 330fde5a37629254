"""`keyhole audit` as a function: every attack that applies to a target, judged, as findings.

Findings in, page out, nothing global. A family of exposures is a function that takes an endpoint or
a model and gives checks to make (check.py), each of which gives findings and skips; to add an
attack, see the registry of its package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from keyhole.audit.check import Check
from keyhole.audit.elsewhere import make
from keyhole.audit.journal import Resuming, make_all, what_determines
from keyhole.audit.opening import Opening, no_endpoint
from keyhole.audit.plan import Plan, checks_of, numbered
from keyhole.audit.stores import StoreTarget
from keyhole.audit.targets import Target, target_of
from keyhole.audit.texts import Layers, TextTarget
from keyhole.core import Audit
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, expect_count, expect_seed
from keyhole.core.exposure import expect_exposures
from keyhole.core.journal import Journal
from keyhole.core.machine import threads_for
from keyhole.core.progress import Track, untracked
from keyhole.core.tasks import MOST_PROCESSES, Runner
from keyhole.oracle import Oracle
from keyhole.oracle.ledger import Notice, ignored, session


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
    layers: Layers | None = None,
    device: str = "cpu",
    processes: int = 0,
    dask: str | None = None,
    ledger: str | Path | None = None,
    journal: str | Path | None = None,
    force: bool = False,
    authorized: bool = False,
    against_defences: bool = False,
    only: Sequence[str] = (),
    seed: int = 0,
    track: Track = untracked,
    resuming: Resuming = lambda done, total: None,  # noqa: ARG005
    endpoint: EndpointOptions | None = None,
    notice: Notice = ignored,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's folder or name, a
    vector store), or an oracle, several by name, or a model with its texts. A store is read with
    `model`, the encoder that made its vectors, or several that may have made them: `texts` of them,
    20 by default, chosen by `seed`; `known` is a file of texts that are in it, `corpus` one of
    texts like them, which is counted. `data` is a file of texts for a model: the first `texts` of
    its `column`, 3 by default, are read back, and the first `flips` flipped, whose right classes
    are in the column `label`: by default the one of that name, if there is one, or else the model's
    own answers count as right. `layers`, or "all", overrides which layers are looked at.
    `processes` makes the checks in so many of them, 0 in this one, `dask` on the cluster at that
    address; an endpoint over the network, or with a ledger, is asked by this process alone.
    `ledger` remembers what endpoints answered. `journal` is the file that remembers
    finished checks, from which an audit that was stopped goes on (`resuming` is told so); remove it
    once the findings are saved. Another audit's journal is refused, or replaced with `force`.
    `authorized` says that a server which is not this machine may be asked, `endpoint` how it is;
    `notice` is told what a person should know at once. `against_defences` puts defences in front of
    every endpoint and model besides, and attacks those. `only` leaves out all but some families
    (weights, inputs, text, predictions) and rules (KH-…).
    """
    started = time.perf_counter()
    expect_seed(seed)
    chosen = expect_exposures(only, "--only")
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    opening = None
    if isinstance(target, str):
        opening = Opening(
            target=target,
            model=_names(model),
            known=_path(known),
            corpus=_path(corpus),
            data=_path(data),
            texts=texts,
            flips=flips,
            column=column,
            label=label,
            layers=_layers(layers),
            device=device,
            ledger=_path(ledger),
            authorized=authorized,
            endpoint=endpoint or EndpointOptions(),
            against_defences=against_defences,
            seed=seed,
            only=chosen,
        )
        opened = opening.open()
    else:
        opened = target_of(target)
        if ledger is not None and not opened.surfaces:
            kind = "vector store" if opened.stores else "model"
            raise no_endpoint(f"the {kind} {opened.name}")
    seconds = time.perf_counter() - started
    determined = what_determines(opened, seed, chosen)
    with (
        session(opened.surfaces, ledger=ledger, notice=notice) as surfaces,
        Journal(journal, determined, force=force) as memory,
        Runner(dask or processes) if processes or dask is not None else nullcontext() as crew,
        threads_for(opened.largest_matrix),
    ):
        checks = checks_of(surfaces, opened, seed, against_defences, chosen)
        plan = Plan.of(opened, determined, checks, seed, seconds, chosen)
        if crew is not None:
            checks = _sendable(checks, plan, opening)
            if opening is not None and opening.stays:
                notice("its checks are made in this process, which holds its ledger and secrets")
        checked, seconds = make_all(numbered(checks), memory, track, resuming, crew)
        return plan.audit(checked, seconds)  # here: it notes how many threads there were


def _layers(layers: Layers | None) -> tuple[int, ...] | Literal["all"] | None:
    return layers if layers is None or isinstance(layers, str) else tuple(layers)


def _names(model: str | Sequence[str] | None) -> tuple[str, ...]:
    return (model,) if isinstance(model, str) else tuple(model or ())


def _path(file: str | Path | None) -> str | None:
    return None if file is None else str(file)


def _sendable(checks: list[Check], plan: Plan, opening: Opening | None) -> list[Check]:
    """The checks, each with what a worker is sent: what to open, and which check it is.

    What stays in this process (an endpoint over the network, one with a ledger) stays as it is.
    """
    if opening is None:
        if not plan.stores:
            raise InputError(
                "expected a target by its name with --processes and --dask, which workers can "
                f"open, got {plan.name} itself"
            )
        return checks
    if opening.stays:
        return checks
    sent = opening.anywhere()
    return [
        check if check.elsewhere is not None
        else replace(check, elsewhere=lambda key=key: partial(make, sent, plan.identity, key))
        for key, check in numbered(checks).items()
    ]  # fmt: skip
