"""Tool calls and reasoning in the text of a model: one small class for each format, and one registry."""
