"""Checks of bit-exact mode on a GPU."""
