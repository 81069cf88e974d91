"""Measurements by ``triforce-tree bench``: speed and retrieval accuracy; and the form of results files."""
