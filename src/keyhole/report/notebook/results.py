"""What each kind of result shows of itself in a cell: text, table or picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from keyhole.core import Outcome, Piece
from keyhole.core.text import percent
from keyhole.disrupt import Disruption
from keyhole.disrupt.certificate.certification import Certification
from keyhole.extract.defences import DefencesTried
from keyhole.extract.extraction import Extraction
from keyhole.harden.evaluate import Evaluation
from keyhole.harden.hardening import Hardening
from keyhole.harden.train import Training
from keyhole.invert.derivatives.bounds import Bounds
from keyhole.invert.inversion import Inversion
from keyhole.invert.structure.layers import LayersInversion
from keyhole.recover.gradients.recover_batch import BatchRecovery
from keyhole.recover.judge import Mark
from keyhole.recover.recovery import TextRecovery
from keyhole.report.notebook.blocks import (
    Bars,
    Grid,
    Head,
    Marked,
    Table,
    Words,
    bars,
    facts,
    head,
    heads,
    matrix,
    number,
    table,
)
from keyhole.report.notebook.curves import Curve, curve

Block = Head | Words | Table | Marked | Bars | Grid | Curve


def extraction(result: Extraction) -> list[Block]:
    """Error against queries, and the matrix that came back."""
    check, weights = result.check, getattr(result.model, "W", None)
    return [
        head(result.status, result.reason),
        facts(
            method=result.method,
            queries=f"{result.queries:,}",
            unknowns=None if result.floor is None else f"{result.floor:,}",
            worst_error_on_fresh_queries=None if check is None else number(check.worst),
            every_entry_of_W_within=number(result.guarantee),
            seconds=f"{result.seconds:.2f}",
        ),
        *curve(
            result.trace, "queries", "worst error on fresh queries", floor=result.floor, log_x=True
        ),
        *(matrix(weights, "W as it came back", "row", "column") if _flat(weights) else []),
        *([] if result.stated is None else [Words(str(result.stated))]),
        Words(result.advice),
    ]


def _flat(weights: object) -> TypeGuard[Tensor]:
    """One matrix: models of several heads hold lists of them."""
    return isinstance(weights, Tensor) and weights.ndim == 2


def defences(result: DefencesTried) -> list[Block]:
    better = sum(each.better for each in result.tried)
    rows = [
        (
            f"{each.defence} {each.setting}".strip(), each.attack, str(each.status),
            number(each.thief_error) or "nothing", f"{each.honest_error:.1e}",
            percent(each.refused), f"{each.queries:,}",
        )
        for each in result.tried
    ]  # fmt: skip
    return [
        Head(
            f"{better} of {len(result.tried)}", "bad" if better else "good",
            "defences leave the attacker a copy at least as exact as what honest clients get",
        ),
        Words(f"{result.target}, d = {result.dim}"),
        table(
            ("defence", "attack", "status", "attacker's error", "honest error", "refused",
             "queries"),
            rows, numbers=3, colours=["bad" if each.better else "good" for each in result.tried],
        ),
    ]  # fmt: skip


def inversion(result: Inversion) -> list[Block]:
    proof = result.certificate
    return [
        head(result.status, result.reason),
        facts(
            method=result.method,
            residual=number(result.residual),
            condition=number(result.condition),
            different_solutions=str(len(result.solutions)),
            starts=f"{result.starts:,}",
            iterations=f"{result.iterations:,}",
            seconds=f"{result.seconds:.2f}",
            proof=None if proof is None else proof.summary(),
        ),
        *curve(result.trace, "iterations", "residual of the start that led to X"),
        *([] if result.X is None else matrix(result.X, "X", "token", "number")),
        Words(result.advice),
    ]


def layers(result: LayersInversion) -> list[Block]:
    rows = [
        (f"layer {place}", number(layer.condition) or "–", number(layer.measured) or "–")
        for place, layer in enumerate(result.layers, 1)
    ]
    if rows:
        rows.append(
            ("all together", number(result.bound) or "–", number(result.amplification) or "–")
        )
    return [
        head(result.status, result.reason),
        facts(
            method=result.method, residual=number(result.residual),
            seconds=f"{result.seconds:.2f}",
        ),
        *([table(("errors grow on the way back", "at most", "measured"), rows)] if rows else []),
        *([] if result.X is None else matrix(result.X, "X", "token", "number")),
    ]  # fmt: skip


def bounds(result: Bounds) -> list[Block]:
    """What the lemmas promise beside what was found."""
    lowest = result.lowest
    rows = [
        ("Lemma 4.5, −n d R⁸", lowest, result.lowest_bound, lowest >= result.lowest_bound),
        ("with a proved constant", lowest, result.lowest_proved, lowest >= result.lowest_proved),
        ("Theorem 1.3 as stated, ‖W‖_F, ‖V‖_F, ‖X‖ left out", lowest,
         result.lowest_bound_without_input, lowest >= result.lowest_bound_without_input),
        ("Lemma 4.4, n³ d³ R¹⁰ (Lipschitz)", result.lipschitz, result.lipschitz_bound,
         result.lipschitz <= result.lipschitz_bound),
    ]  # fmt: skip
    held = [
        f"{words}: {'holds' if each else 'does not hold'}"
        for words, each in result.assumptions.items()
    ]
    return [
        Head(f"R = {result.R:.3g}", "good" if result.proved else "part", "; ".join(held)),
        table(
            ("bound on the Hessian", "measured", "bound", "holds"),
            [(name, f"{seen:.3g}", f"{bound:.3g}", "yes" if kept else "NO")
             for name, seen, bound, kept in rows],
            colours=["good" if kept else "bad" for *_, kept in rows],
        ),
        table(("norm", "size"), [(name, f"{size:.3g}") for name, size in result.norms.items()]),
    ]  # fmt: skip


def text(result: TextRecovery) -> list[Block]:
    """The text with each token in the colour of its mark; a plain one where nobody wrote them."""
    return [
        head(result.status, result.reason),
        Marked(_pieces(result), result.marked),
        Words(f"{result.method}: {result.cost}"),
    ]


def _pieces(result: TextRecovery) -> tuple[Piece, ...]:
    if len(result.pieces) == len(result.marks) and result.pieces:
        pairs = zip(result.pieces, result.marks, strict=True)
        return tuple(Piece(piece, mark.value, None) for piece, mark in pairs)
    mark = Mark.VERIFIED if result.verified else Mark.UNKNOWN  # a file of before pieces were kept
    return (Piece(result.text, mark.value, None),)


def batch(result: BatchRecovery) -> list[Block]:
    labels = result.labels if len(result.labels) == len(result.texts) else ()
    shown: list[Block] = [
        Marked(_pieces(each), f"class {labels[place]}; {each.marked}" if labels else each.marked)
        for place, each in enumerate(result.texts)
    ]
    return [
        head(result.status, result.reason), *shown,
        Words(f"{len(result.tokens)} different tokens in the batch; {result.cost}"),
    ]  # fmt: skip


def disruption(result: Disruption) -> list[Block]:
    """How many answers flipped, in which heads attention was cut, and the flips themselves."""
    right, count = len(result.attacked), max(1, len(result.outcomes))
    stood = right - result.flips
    texts = {example.id: example.text for example in result.examples}
    flipped = [outcome for outcome in result.attacked if outcome.flipped]
    lost = Counter((unit.layer, unit.head) for outcome in flipped for unit in outcome.cut)
    words = result.obstacle or f"{result.flips} of {right} right answers flipped"
    tag = percent(result.success) if right else "could not check"
    return [
        Head(tag, head(result.status, "").colour, words),
        Words(f"{result.method.get('words', '')}; {result.model or 'a model in memory'}"),
        bars(
            [
                ("flipped", result.flips / count, f"{result.flips}"),
                ("stood", stood / count, f"{stood}"),
                ("wrong before", result.skipped / count, f"{result.skipped}, left alone"),
            ]
        ),
        *heads(lost, *(1 + max((place[side] for place in lost), default=-1) for side in (0, 1))),
        table(
            ("text", "from", "to", "units cut", "of all", "queries"),
            [
                (
                    texts.get(outcome.id, outcome.id), _answer(outcome.before),
                    _answer(outcome.after), f"{outcome.masked:,}", percent(outcome.share, 2),
                    f"{outcome.queries:,}",
                )
                for outcome in flipped
            ],
            numbers=3,
        ),
        Words(f"control, nothing cut: logits changed by {result.control.change:g}"),
    ]  # fmt: skip


def _answer(answer: Sequence[int]) -> str:
    return " ".join(str(each) for each in answer)


def certification(result: Certification) -> list[Block]:
    right = result.right
    open_ = len(right) - result.certified - result.flipped
    count = max(1, len(right))
    colours = {Outcome.GIVEN_AWAY: "bad", Outcome.KEPT: "good", Outcome.UNCHECKED: "part"}
    return [
        Head(
            f"{result.certified} of {len(right)}", colours[result.outcome],
            f"right answers stand, proved, whichever {result.k} units are cut",
        ),
        bars(
            [
                ("proved to stand", result.certified / count, str(result.certified)),
                ("flipped by one unit", result.flipped / count, str(result.flipped)),
                ("left open", open_ / count, str(open_)),
            ]
        ),
        table(
            ("text", "proved", "margin", "least left by one unit", "by k units", "units tried"),
            [
                (
                    proof.id, "yes" if proof.holds else "no", f"{proof.margin:.3g}",
                    f"{proof.alone:.3g}", "–" if proof.whole is None else f"{proof.whole:.3g}",
                    f"{proof.units:,}",
                )
                for proof in right
            ],
        ),
    ]  # fmt: skip


def evaluation(result: Evaluation) -> list[Block]:
    figures = result.figures().items()
    return [
        bars([(name, value, percent(value, 1)) for name, value in figures]),
        Words(f"{result.examples} examples, {result.seconds:.1f} s"),
    ]


def training(result: Training) -> list[Block]:
    losses = list(enumerate(result.losses, 1))
    return [
        Words(result.summary()),
        *curve(losses, "epochs", "mean loss", log_y=False),
    ]


def hardening(result: Hardening) -> list[Block]:
    """Each figure before, and after over the seeds."""
    measured = {name: each.figures() for name, each in result.evaluations().items()}
    figures = dict.fromkeys(figure for each in measured.values() for figure in each)
    shown = [
        (f"{figure}, {name}", each[figure], percent(each[figure], 1))
        for figure in figures
        for name, each in measured.items()
        if figure in each
    ]
    finished = "" if result.finished else "; it is not finished"
    return [
        Words(f"{result.model}: {result.method}, {result.examples} examples{finished}"),
        bars(shown),
        *(Words(f"seed {each.seed}: {each.training.summary()}") for each in result.runs),
        *(drawn for each in result.runs[:1] for drawn in training(each.training)[1:]),
    ]
