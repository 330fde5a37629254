"""Every extraction method under the name that people type, and what the audit tries it on.

To add one, write the attack in its own module and add one entry to METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry
from keyhole.extract.attention_layers import AttentionLayers
from keyhole.extract.auto import Auto, Kind
from keyhole.extract.block import TransformerBlock
from keyhole.extract.fitted import Fitted
from keyhole.extract.fitted_layer import FittedLayer
from keyhole.extract.fitted_signs import FittedSigns
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import Method
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.multi_head_as_published import MultiHeadAsPublished
from keyhole.extract.nuclear_norm import NuclearNorm
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.ordinary_questions import OrdinaryLabels, OrdinaryQuestions
from keyhole.extract.orthogonal_heads import OrthogonalHeads
from keyhole.extract.output_layer import OutputLayer
from keyhole.extract.relu_network import ReluNetwork
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.sign_only_as_published import SignOnlyAsPublished
from keyhole.extract.single_head import SingleHead
from keyhole.extract.sub_layer import AttentionSubLayer
from keyhole.extract.tolerant import Tolerant
from keyhole.extract.tolerant_as_published import TolerantAsPublished
from keyhole.extract.transformer_blocks import TransformerBlocks
from keyhole.oracle import Clipped, Oracle, Rounded
from keyhole.oracle import SignOnly as Thresholded


@dataclass(frozen=True)
class Row:
    """One exposure that the audit tries a method on.

    `reads` is the kind of answers that the method needs, and `settings` are its
    hyperparameters there. `view` degrades the answers as a server might, to find out
    whether that would help. `budget` is the share of the unknowns that the attacker may
    spend in queries.
    """

    exposure: Exposure
    reads: Kind
    remedy: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    view: Callable[[Oracle], Oracle] | None = None
    budget: float | None = None


_COARSER = (
    "Count queries per client and stop below the number of unknowns. Rounded answers to inputs of "
    "bounded norm cost the attacker digits, a label alone costs queries; neither is a wall."
)
_FEWER = (
    "Count queries per client; a budget below the number of unknowns leaves W unknown."
)
_BOUND = "Bound the norms of inputs as well: long ones undo the rounding."
_FURTHER = "Fewer decimals or a tighter bound on norms: they cost the attacker digits."
_LABEL = "Count queries per client: a label is one bit, and the attack needs them all."
_VECTOR = "Return a score or a label; a vector of n numbers gives away n at a time."


def tolerant(
    answer_error: float,
    max_norm: float | None = None,
    bound: float | None = None,
    margin: float | None = None,
    repeats: int = 1,
    seed: int = 0,
) -> Tolerant:
    """Make Tolerant; `answer_error` is its tolerance, which other methods use for another thing."""
    return Tolerant(
        answer_error,
        bound=bound,
        margin=margin,
        max_norm=max_norm,
        repeats=repeats,
        seed=seed,
    )


def tolerant_as_published(
    answer_error: float,
    bound: float,
    margin: float,
    seed: int = 0,
) -> TolerantAsPublished:
    """Make TolerantAsPublished; `answer_error` is the theorem's τ."""
    return TolerantAsPublished(answer_error, bound, margin, seed)


_scores = partial(Exposure, "KH-WEIGHTS-SCORES")
_rounded = partial(Exposure, "KH-WEIGHTS-ROUNDED-SCORES")
_signs = partial(Exposure, "KH-WEIGHTS-SIGNS")
_vectors = partial(Exposure, "KH-WEIGHTS-VECTORS")

METHODS: Registry[Method, Row] = Registry(
    Entry("auto", Auto, (Row(_rounded(), Kind.ROUNDED, _BOUND),)),
    Entry(
        "single-head",
        SingleHead,
        (
            Row(_scores("full"), Kind.HEAD, _COARSER),
            Row(_scores("budget"), Kind.HEAD, _FEWER, budget=0.5),
        ),
    ),
    Entry("low-rank", LowRank, (Row(_scores("low-rank"), Kind.HEAD, _COARSER),)),
    Entry("nuclear-norm", NuclearNorm),
    Entry(
        "tolerant",
        tolerant,
        (
            Row(
                _rounded(defences=("decimals-3",)),
                Kind.HEAD,
                _BOUND,
                {"answer_error": 5e-4},
                view=lambda oracle: Rounded(oracle, 3),
            ),
            Row(
                _rounded(defences=("decimals-3", "norm-10")),
                Kind.HEAD,
                _FURTHER,
                {"answer_error": 5e-4, "max_norm": 10.0},
                view=lambda oracle: Rounded(Clipped(oracle, 10.0), 3),
            ),
        ),
        Tolerant,
    ),
    Entry("tolerant-as-published", tolerant_as_published, method=TolerantAsPublished),
    Entry(
        "sign-only",
        SignOnly,
        (
            Row(_signs(), Kind.HEAD, _LABEL, {"accuracy": 1e-4}, view=Thresholded),
            Row(_signs("labels"), Kind.SIGNS, _LABEL, {"accuracy": 1e-4}),
        ),
    ),
    Entry("sign-only-as-published", SignOnlyAsPublished),
    Entry("multi-head", MultiHead, (Row(_scores("heads"), Kind.HEADS, _COARSER),)),
    Entry("multi-head-as-published", MultiHeadAsPublished),
    Entry("orthogonal-heads", OrthogonalHeads),
    Entry("fitted", Fitted),
    Entry("fitted-layer", FittedLayer),
    Entry("fitted-signs", FittedSigns),
    Entry("ordinary-questions", OrdinaryQuestions),
    Entry(
        "ordinary-labels",
        OrdinaryLabels,
        note="One head from the labels of ordinary queries (ours).",
    ),
    Entry(
        "one-layer",
        OneLayerTransformer,
        (Row(_scores("transformer"), Kind.LAYER, _COARSER),),
    ),
    Entry("relu-network", ReluNetwork),
    Entry("output-layer", OutputLayer),
    Entry(
        "full-output",
        FullOutput,
        (
            Row(_vectors("last-token"), Kind.LAST_VECTOR, _VECTOR),
            Row(_vectors("every-token"), Kind.EVERY_VECTOR, _VECTOR),
        ),
    ),
    Entry("attention-sub-layer", AttentionSubLayer),
    Entry("transformer-block", TransformerBlock),
    Entry("transformer-blocks", TransformerBlocks),
    Entry("attention-layers", AttentionLayers),
)
