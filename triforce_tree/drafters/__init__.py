"""Drafters propose token trees. ``base`` has the protocol; the others are a draft model, suffix matching,
combinations of both, and trained heads."""
