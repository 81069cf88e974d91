"""What every part stands on: the state of the sequences, the executor of stages, ranks, devices, files."""
