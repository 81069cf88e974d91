"""Attention over tree-shaped KV by blocks of queries: the plan and its Triton kernels."""
