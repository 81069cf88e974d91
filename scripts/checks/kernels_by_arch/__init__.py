"""Every kernel compiled ahead of time for GPUs that are not at hand."""
