"""Verification: which proposed tokens a model accepts, and the forward that decides it."""
