"""The kernels of linear layers, compiled for GPUs that are not at hand."""
