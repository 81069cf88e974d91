"""Explains the decoding of a prompt: passes, acceptance, times beside their rooflines, drafted trees."""
