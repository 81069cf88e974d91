"""Hybrid models: layers that keep a recurrent state instead of keys and values, or in addition to them."""
