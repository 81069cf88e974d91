"""What decoding chose for a prompt, and why: acceptance, times beside their rooflines, drafted trees."""
