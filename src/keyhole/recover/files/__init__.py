"""Leaks in files, Keyhole's own and those that other programs wrote.

A file becomes arrays by name (arrays.py, llama_slot.py); names say what an array is, or else
its shape does (readings.py); where the layer is not known, contents.py takes the one that gives
a verified text. sources.py is the way in.
"""
