"""Suffix matching: an index of the n-grams of sequences, and chains grafted onto token trees."""

from triforce_tree.kernels.suffix.graft import graft_chain
from triforce_tree.kernels.suffix.ngrams import index_ngrams, match_suffix

__all__ = ["graft_chain", "index_ngrams", "match_suffix"]
