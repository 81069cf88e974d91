"""Attention to trees of texts by blocks of queries: plans and Triton kernels."""
