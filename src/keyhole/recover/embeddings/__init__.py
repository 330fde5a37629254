"""Text from one vector: counts of a corpus propose, the encoder itself decides."""
