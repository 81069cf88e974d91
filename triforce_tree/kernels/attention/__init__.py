"""Tree attention: its definition in plain torch, plans, and the Triton kernels that run them."""
