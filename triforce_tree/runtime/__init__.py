"""Parts that all other folders use: state of the sequences, executor of stages, ranks, devices, files."""
