"""Drafters that read the target's hidden states: Medusa heads and EAGLE-3, in their published formats."""
