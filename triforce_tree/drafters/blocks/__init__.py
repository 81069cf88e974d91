"""Drafters that predict a whole block of tokens in one forward: DFlash and its relatives."""
