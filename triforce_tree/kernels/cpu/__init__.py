"""Attention and operators of a decoding step on the CPU, by C kernels, torch and oneDNN."""
