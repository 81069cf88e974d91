"""Drafters, which propose token trees: the protocol (``base``), the draft model, prompt lookup."""
