"""One module for each way to train against attacks on attention."""
