"""What an attack costs before it is run: queries, tokens, bytes, hours and money.

    cost.head(64, rank=8, exposure="scores")        -> Estimate: .queries .floor .tokens .bytes
    cost.layer(576, exposure="log-probabilities", vocabulary=49_152)
    cost.text(12, exposure="embedding", machine="gpu")   -> TextEstimate: .passes .seconds .exact
    cost.Prices(rate=50, price=0.01).of(estimate)   -> Cost: .hours .money .days

Counts are the methods' own (`expected`); what only a run can tell is in measured.json, each figure
with its command, commit and machine.
"""

from keyhole.cost.estimate import Cost, Estimate, Prices
from keyhole.cost.texts import TextCost, TextEstimate, text
from keyhole.cost.weights import HEAD_EXPOSURES, LAYER_EXPOSURES, head, layer

__all__ = [
    "HEAD_EXPOSURES", "LAYER_EXPOSURES", "Cost", "Estimate", "Prices", "TextCost", "TextEstimate",
    "head", "layer", "text",
]  # fmt: skip
