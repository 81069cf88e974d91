"""Loads models and tokenizers from folders, the hub or objects, and checks them."""
