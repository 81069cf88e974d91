"""Which implementation computes tree attention: the one branch between CPU and GPU."""

from triforce_tree.kernels.reference import tree_attention

__all__ = ["tree_attention"]
