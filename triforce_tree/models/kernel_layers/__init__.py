"""Computes the layers of a model on a GPU by kernels of this package."""
