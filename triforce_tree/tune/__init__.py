"""Measures the fastest settings for a machine, a pair of models and a kind of text: a profile."""
