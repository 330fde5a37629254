"""Text from one vector: a reader learnt from the encoder proposes, the encoder itself decides."""
