"""The searches that attacks on text share: relax, snap to tokens, substitute."""
