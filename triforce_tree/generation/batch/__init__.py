"""The sequences of one generation, decoded in the rows of one batch as they begin and end."""
