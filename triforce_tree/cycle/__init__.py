"""The whole decoding cycle as device code: batched, without a host in the loop, captured in CUDA graphs."""
