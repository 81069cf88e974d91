"""Operators of a decoding step on the CPU, in C (part of ``fp32/fp32.c``) or else by their definitions."""
