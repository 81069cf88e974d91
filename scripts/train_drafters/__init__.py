"""Training of drafters for a given target, see ``__main__``."""
