"""Suffix matching: an index of n-grams of sequences, and chains that are added to token trees."""

from triforce_tree.kernels.suffix.graft import graft_chain
from triforce_tree.kernels.suffix.ngrams import index_ngrams, match_suffix

__all__ = ["graft_chain", "index_ngrams", "match_suffix"]
