"""One call of ``generate``: its inputs, options and output, as transformers has them."""
