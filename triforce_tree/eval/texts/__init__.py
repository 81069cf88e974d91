"""Texts of seven kinds that no model of this package was trained on, and prompts cut from them."""
