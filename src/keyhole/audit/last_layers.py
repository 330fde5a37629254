"""The last layer behind a server's log-probabilities: its width, and how much of its matrix.

Every answer of the whole vocabulary gives away one direction of what the output matrix spans, until
there are no more (extract/output_layer.py). The audit asks for `QUERIES` of them at most. Where the
server states a width beyond that it takes a sample, and says how far that came and how to go on.
"""

from __future__ import annotations

import os
import time
from contextlib import closing

from keyhole.audit.check import Checked
from keyhole.core import Finding, Skip, Status
from keyhole.core.endpoint import KEY
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.extract.output_layer import OutputLayer
from keyhole.oracle.completions import COMPLETION, Completions
from keyhole.oracle.probe import Route, Server
from keyhole.oracle.protocol import Counted
from keyhole.report import words

QUERIES, SAMPLE = 1_024, 64
_WIDEST = 0.9  # of the queries: a twelfth more than the width is asked for, and a few to check
REMEDY = (
    "Cap n_probs (20) in a proxy and take logit_bias and post_sampling_probs out of requests, with "
    "which a client chooses the tokens; fewer digits cost an attacker digits of the matrix; "
    "--api-key, and a count of queries per client."
)


def reads(server: Server, route: Route) -> bool:
    """Is it a route whose answers give whole vectors, by the numbers of tokens?"""
    return server.kind == "llama.cpp" and route.path == COMPLETION


def last_layer(
    exposure: Exposure, server: Server, route: Route, probe: str, track: Track
) -> Checked:
    """The layer, from a bounded number of answers; skipped where they are no whole vectors."""
    started = time.perf_counter()
    answered = server.try_route(route, probe, key=bool(os.environ.get(KEY)))
    if not answered.open:
        return Checked(skips=(Skip(exposure, "OutputLayer", f"not given: {answered.reason}"),))
    address = server.address or server.url
    with closing(Completions.at(f"{address}{route.path}", server.options)) as oracle:
        given = len(answered.content)
        if given < (oracle.vocabulary or given):
            reason = (
                f"{given} log-probabilities at a time: keyhole extract {server.url} --method "
                f"output-layer --top {given} finds out whether a bias chooses them"
            )
            return Checked(skips=(Skip(exposure, "OutputLayer", reason),))
        budget = QUERIES if (oracle.width or 0) < _WIDEST * QUERIES else SAMPLE
        counted = Counted(oracle, budget, track(words.exposure(exposure), budget))
        result = OutputLayer()(counted)
    reason = result.reason
    if result.status is Status.BUDGET:
        reason += f"; go on with keyhole extract {server.url} --method output-layer --ledger FILE"
    finding = Finding(
        exposure=exposure, attack="OutputLayer", status=result.status,
        reason=reason, remedy=REMEDY, error=None if result.check is None else result.check.worst,
        queries=counted.queries, seconds=time.perf_counter() - started, lower_bound=result.floor,
        known=result.known, sought="last layer",
    )  # fmt: skip
    return Checked((finding,))
