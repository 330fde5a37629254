"""Parts of the extraction of a whole Transformer block."""
