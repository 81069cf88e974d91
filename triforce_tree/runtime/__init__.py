"""Used by all other folders: the state of the sequences, the executor of stages, ranks, devices, files."""
