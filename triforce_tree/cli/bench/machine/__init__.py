"""Benchmarks of what a machine does with batches, offloading, kernels and texts that branch."""
