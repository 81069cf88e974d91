"""Verification: distributions, random numbers, and the forward that accepts or refuses proposals."""
