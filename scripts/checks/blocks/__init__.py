"""Attention by blocks of queries, compiled for GPUs that are not at hand."""
