"""Leaks in files, Keyhole's own and those that other programs wrote.

sources.py finds the files, arrays.py reads each as arrays by name, readings.py says what those may
be, by their names or else by their shapes, and contents.py makes leaks of them: where the layer is
not known, those of the layer that gives a verified text.
"""
