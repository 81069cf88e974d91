"""What fits: memory of device and host, the machine's bandwidths, measured settings on disk."""
