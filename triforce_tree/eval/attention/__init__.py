"""Attention alone: problems, clocks, other implementations."""
