"""Mixture-of-experts layers: the modules that hold their weights, and forwards over few tokens."""
