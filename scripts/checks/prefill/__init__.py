"""The kernels of a prefill, compiled for GPUs that are not at hand."""
