"""``triforce-tree serve``."""
