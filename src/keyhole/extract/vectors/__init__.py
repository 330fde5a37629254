"""Reading a layer that returns vectors: the measurements behind full_output.py."""
