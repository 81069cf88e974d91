"""Operators of a decoding step on the CPU in C, as a part of ``fp32/fp32.c``; their definitions serve the rest."""
