"""Leaks in files, Keyhole's own and those that other programs wrote.

arrays.py reads a file as arrays by name, readings.py finds what they may be by their
names or shapes, and contents.py makes leaks of them. If the layer is not known, it is
the one that gives a verified text.
"""
