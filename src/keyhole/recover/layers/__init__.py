"""Text from hidden states, caches, attention maps and outputs, and the searches they share."""
