"""Linear layers of few rows, of 16, 8 or 4 bits a weight."""
