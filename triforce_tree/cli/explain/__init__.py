"""``triforce-tree explain``."""
