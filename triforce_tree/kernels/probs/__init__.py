"""Kernels that turn logits into probabilities."""
