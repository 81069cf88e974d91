"""Operators of a decoding step on the CPU, in C within ``fp32/fp32.c``; definitions serve the rest."""
