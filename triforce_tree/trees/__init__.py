"""Token trees as shapes: which nodes there are, and how they lie in fixed buffers."""
