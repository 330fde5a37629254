"""Attacks on servers that defend themselves, and what both sides are left with."""
