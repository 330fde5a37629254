"""Weights from black-box answers: one module per theorem. Each method is called on an oracle.

docs/mathematics.md has all of it in one notation.
"""

from keyhole.core import Status
from keyhole.extract.attention_layers import AttentionLayers
from keyhole.extract.auto import Auto, choose
from keyhole.extract.block import TransformerBlock
from keyhole.extract.canonical import canonical, same_function
from keyhole.extract.defences import Adapted
from keyhole.extract.extraction import Check, Extraction
from keyhole.extract.fitted import Fitted
from keyhole.extract.fitted_layer import FittedLayer
from keyhole.extract.fitted_signs import FittedSigns
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import Method, judge
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.multi_head_as_published import MultiHeadAsPublished
from keyhole.extract.nuclear_norm import NuclearNorm
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.ordinary_questions import OrdinaryLabels, OrdinaryQuestions
from keyhole.extract.orthogonal_heads import OrthogonalHeads
from keyhole.extract.output_layer import OutputLayer
from keyhole.extract.relu_network import ReluNetwork
from keyhole.extract.run import run
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.sign_only_as_published import SignOnlyAsPublished
from keyhole.extract.single_head import SingleHead
from keyhole.extract.sub_layer import AttentionSubLayer
from keyhole.extract.tolerant import Tolerant
from keyhole.extract.tolerant_as_published import TolerantAsPublished
from keyhole.extract.transformer_blocks import TransformerBlocks

__all__ = [
    "Adapted",
    "AttentionLayers",
    "AttentionSubLayer",
    "Auto",
    "Check",
    "Extraction",
    "Fitted",
    "FittedLayer",
    "FittedSigns",
    "FullOutput",
    "LowRank",
    "Method",
    "MultiHead",
    "MultiHeadAsPublished",
    "NuclearNorm",
    "OneLayerTransformer",
    "OrdinaryLabels",
    "OrdinaryQuestions",
    "OrthogonalHeads",
    "OutputLayer",
    "ReluNetwork",
    "SignOnly",
    "SignOnlyAsPublished",
    "SingleHead",
    "Status",
    "Tolerant",
    "TolerantAsPublished",
    "TransformerBlock",
    "TransformerBlocks",
    "canonical",
    "choose",
    "judge",
    "run",
    "same_function",
]
