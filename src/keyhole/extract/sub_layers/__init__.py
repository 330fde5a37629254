"""Reading an attention sub-layer as checkpoints have it: the measurements behind sub_layer.py."""
