"""Models and tokenizers from folders, the hub or objects, checked before they are used."""
