"""A draft for a given target with its own tokenizer."""
