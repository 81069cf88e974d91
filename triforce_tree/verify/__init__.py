"""Verification: distributions, random numbers, and the forward that accepts or rejects proposed tokens."""
