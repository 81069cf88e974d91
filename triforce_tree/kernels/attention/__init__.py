"""Attention of token trees: definitions, plans, and the Triton kernels that run them."""
