"""Modules and linear layers of models on a CPU."""
