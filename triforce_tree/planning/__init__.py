"""Plans device and host memory, measures the machine's bandwidths, and stores measured settings on disk."""
