"""Rows of one forward, and a plain full cache."""
