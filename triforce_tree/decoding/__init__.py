"""The decoding loop: stages, the program that holds them, draft length, costs, stop criteria."""
