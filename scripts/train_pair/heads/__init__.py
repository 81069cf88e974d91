"""Training of drafting heads (Medusa, EAGLE-3) for the embedded target, see ``__main__``."""
