"""What one decoding step does besides attention and matrix products.

The engine keeps a batch of sequences of different lengths on the device and never asks how long they are:
each operator here reads lengths, indices and random numbers from tensors. The definitions are plain torch and
may loop in Python; the Triton kernels (``*_kernels``) that serve CUDA tensors never synchronise with the host
and can be captured in CUDA graphs.
"""

from triforce_tree.kernels.step.accept import accept_greedy, accept_tree, second_choice
from triforce_tree.kernels.step.grow import begin_tree, expand_nodes, place_nodes
from triforce_tree.kernels.step.rows import append_rows, chunk_means, move_rows
from triforce_tree.kernels.step.select import select_chunks

__all__ = [
    "accept_greedy",
    "accept_tree",
    "append_rows",
    "begin_tree",
    "chunk_means",
    "expand_nodes",
    "move_rows",
    "place_nodes",
    "second_choice",
    "select_chunks",
]
