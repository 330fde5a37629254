"""Does a server take vectors in the place of a prompt? With the model's weights it is found out.

A text is sent as the embeddings of its tokens. If the log-probabilities that come back are those of
the model for that text, the server computes whatever function of vectors it is asked for: what
attacks on weights need, and a way past every filter that reads prompts.
"""

from __future__ import annotations

import time
from contextlib import closing

import torch

from keyhole.audit.check import Checked
from keyhole.core import Finding, Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import Loaded, head_of
from keyhole.oracle.completions import FORMS, VectorPrompts
from keyhole.oracle.http import Refused
from keyhole.oracle.probe import Server
from keyhole.oracle.protocol import OracleError

_SAME = 0.1  # of a log-probability: bfloat16 through all layers leaves less


def takes_vectors(
    exposure: Exposure, server: Server, loaded: Loaded, text: str, track: Track
) -> Checked:
    """Whether it does, without a key."""
    del track
    form, started = FORMS[server.kind], time.perf_counter()
    if head_of(loaded.model) != "causal":
        return Checked(skips=(Skip(exposure, "none", "the weights have no head for next tokens"),))
    parts = anatomy(loaded.model)
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]], device=parts.device)
    try:
        with closing(VectorPrompts(server, parts.table.shape[1], key=False)) as oracle:
            given = oracle(parts.table[ids].double().cpu())[0]
    except Refused as error:
        reason = f"not taken: {error.status}"
        return Checked(skips=(Skip(exposure, "probe", reason),))
    except OracleError as error:
        return Checked(skips=(Skip(exposure, "probe", str(error), unchecked=True),))
    with torch.no_grad():
        own = loaded.model(ids).logits[0, -1].double().log_softmax(-1).cpu()
    off = float((own.topk(len(given)).values - given).abs().max())
    same = off <= _SAME
    meaning = (
        "nothing is read by that alone, and every attack that asks by vectors may begin"
        if same
        else "another model, or it computes with something else than the vectors"
    )
    reason = (
        "vectors are taken as a prompt without a key; the best log-probabilities are "
        f"{off:.1e} from the model's own: {meaning}"
    )
    finding = Finding(
        exposure=exposure, attack="probe",
        status=Status.NOT_APPLICABLE if same else Status.MISMATCH, reason=reason,
        remedy=form.remedy, error=off, queries=1, seconds=time.perf_counter() - started,
        sought="vectors as prompts",
    )  # fmt: skip
    return Checked((finding,))
