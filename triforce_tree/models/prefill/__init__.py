"""Computes layers over the many tokens of a prefill on a GPU."""
