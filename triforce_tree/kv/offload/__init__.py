"""Keeps KV caches and weights in host memory, and copies them between host and device."""
