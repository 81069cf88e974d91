"""How layers compute the many rows of a prefill on a GPU."""
