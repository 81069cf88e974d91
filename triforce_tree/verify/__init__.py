"""Verification of proposed tokens: the forward, the distributions and the random numbers that decide."""
