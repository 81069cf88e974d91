"""Shapes of token trees: which nodes a tree has, and how they are laid out in fixed buffers."""
