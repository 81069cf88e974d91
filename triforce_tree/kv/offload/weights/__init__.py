"""Weights in host memory, copied to the device for each call of a layer."""
