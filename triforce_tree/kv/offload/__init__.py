"""KV caches and weights in host memory, and the copies between host and device."""
