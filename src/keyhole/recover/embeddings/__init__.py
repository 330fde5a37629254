"""Text from one vector: counts of a corpus propose texts, and the encoder decides."""
