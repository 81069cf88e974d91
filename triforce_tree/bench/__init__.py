"""Measurements: speed on real text, needle accuracy, overlap of the levels' laws."""
