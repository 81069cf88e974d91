"""Attention on the CPU: with torch and oneDNN, and with a kernel in C."""
