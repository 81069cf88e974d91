"""Classes by which other programs use this engine."""
