"""Measurements and checks: speed on real text, needle accuracy, overlap of the levels' distributions."""
