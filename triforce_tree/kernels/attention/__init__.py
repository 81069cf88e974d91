"""Tree attention: its definition in plain torch, plans, backends and Triton kernels."""
