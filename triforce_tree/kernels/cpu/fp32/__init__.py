"""Operations of a decoding pass in fp32 for few tokens, in C (``fp32.c``); torch computes everything else."""
