"""Leaks that other programs wrote: arrays with names or without, told apart by the model.

A file becomes arrays by name (arrays.py, pickled.py); names say what an array is (names.py,
by_name.py), or else its shape does (shapes.py); where the layer is not known, layers.py says which
are likely, and only one that gives a verified text is taken (contents.py).
"""

from keyhole.recover.foreign.arrays import SUFFIXES, Dump, arrays_of, read_dump
from keyhole.recover.foreign.contents import Contents, contents_of
from keyhole.recover.foreign.written_ids import WrittenIds

__all__ = ["SUFFIXES", "Contents", "Dump", "WrittenIds", "arrays_of", "contents_of", "read_dump"]
