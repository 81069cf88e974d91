"""A batch whose sequences begin alike: the common prefix is stored and read once."""
