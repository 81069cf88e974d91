"""Attention on the CPU: by torch and oneDNN, and by a kernel of our own in C."""
