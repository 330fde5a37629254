"""The version, in one place: the package is built with it, and a bare checkout knows it too."""

__version__ = "0.1.0"
