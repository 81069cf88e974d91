"""Measured settings for a machine, a pair of models and a kind of text: the way to a profile."""
