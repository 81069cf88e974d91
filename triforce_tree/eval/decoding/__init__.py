"""Batches and offloaded caches beside plain decoding of the same engine."""
