"""Exact attention, whose results do not depend on other queries or on the KV slots of keys, bit for bit."""
