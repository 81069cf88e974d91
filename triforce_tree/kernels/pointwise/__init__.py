"""Elementwise parts of a decoder layer, each in one kernel."""
