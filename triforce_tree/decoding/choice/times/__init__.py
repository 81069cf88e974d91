"""Measured times of passes and stages."""
