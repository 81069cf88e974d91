"""Drafters, which propose token trees: the protocol (``base``), the draft model, suffix matching, both."""
