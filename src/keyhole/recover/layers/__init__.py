"""Attacks on hidden states, caches, attention maps and attention outputs, and their searches."""
