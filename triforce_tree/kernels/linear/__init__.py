"""Linear layers with few input rows and weights of 16, 8 or 4 bits."""
