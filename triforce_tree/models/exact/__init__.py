"""Models whose rows have the same bits whatever is computed with them (``exact=True``)."""
