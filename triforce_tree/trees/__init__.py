"""Shapes of token trees, and the layout of their nodes in fixed buffers."""
