"""Further distillation of the embedded draft, on several kinds of text."""
