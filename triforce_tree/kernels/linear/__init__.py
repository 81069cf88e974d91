"""Linear layers with few input rows, with weights of 16, 8 or 4 bits."""
