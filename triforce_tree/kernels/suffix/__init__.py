"""Suffix matching: an index of the n-grams of sequences."""

from triforce_tree.kernels.suffix.ngrams import index_ngrams, match_suffix

__all__ = ["index_ngrams", "match_suffix"]
