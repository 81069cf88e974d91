"""A text that branches: a tree whose nodes store their keys and values once, for all leaves below them."""
