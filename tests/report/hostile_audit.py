"""An audit in which every string and many numbers are hostile."""

from __future__ import annotations

from keyhole.core import Audit, Cut, Exposure, Finding, Remedied, Skip, Status
from keyhole.core.finding import Piece, Reading, Readings

HOSTILE = (
    "</title></style></script><script>window.stolen = 1</script>"
    "<img src=x onerror='window.stolen = 1'>\"'><a href=javascript:stolen=1>x</a>"
    "{{ 7 * 7 }}{% raw %} ]]> \x00\x1b[31m\x07 \u202eevil\u2066 \ud800 [red]x[/red]\r\nlast"
)


RULES = {
    "weights": "KH-WEIGHTS-SCORES",
    "text": "KH-TEXT-HIDDEN-STATES",
    HOSTILE: "KH-TEXT-OTHER",
    "prediction": "KH-PREDICTIONS-CUTS",
    "input": "KH-INPUTS-LAYER-OUTPUT",
}


def audit() -> Audit:
    read = Reading(
        HOSTILE,
        (Piece(HOSTILE, HOSTILE, True), Piece(HOSTILE, "verified", False)),
        True,
        True,
        HOSTILE,
        3,
        0.5,
        0.5,
    )
    texts = tuple(
        Readings(HOSTILE, 1, f"{HOSTILE}{n}", (read,) * (2 - n)) for n in range(2)
    )
    cut = Cut((HOSTILE, "b"), HOSTILE, HOSTILE, 0.9, 0.1, 0.01, 1, 1, ((0, 0, 0, 1),))
    findings = [
        Finding(
            exposure=Exposure(
                RULES[sought],
                f"{HOSTILE}{number}",
                10**30,
                (HOSTILE,),
                HOSTILE,
                HOSTILE,
            ),
            attack=HOSTILE,
            status=status,
            reason=f"--data {HOSTILE}",
            remedy=HOSTILE,
            error=1e300,
            queries=10**30,
            seconds=1e300,
            lower_bound=-(10**30),
            known=0.5,
            trace=((-(10**40), 1e300), (10**40, -1.0)),
            sought=sought,
            texts=texts if sought == "text" else (),
            cuts=(cut,),
            control=number == 3,
            remedied=(Remedied(HOSTILE, 1e300, HOSTILE),),
        )
        for number, (status, sought) in enumerate(
            (
                (Status.RECOVERED, "weights"),
                (Status.INEXACT, "text"),
                (Status.BUDGET, "prediction"),
                (Status.UNSOLVED, HOSTILE),
                (Status.INEXACT, "input"),
            )
        )
    ]
    skips = (
        Skip(Exposure("KH-TEXT-OTHER", HOSTILE), HOSTILE, HOSTILE, unchecked=True),
    )
    about = {HOSTILE: HOSTILE}
    return Audit(
        HOSTILE, HOSTILE, tuple(findings), skips, created=HOSTILE, environment=about
    )
