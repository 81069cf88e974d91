"""Collectives of several ranks, by peer memory (memory that ranks read from each other) or by NCCL."""

from triforce_tree.kernels.ranks.collectives import all_reduce, merged_bytes, merged_over_ranks

__all__ = ["all_reduce", "merged_bytes", "merged_over_ranks"]
