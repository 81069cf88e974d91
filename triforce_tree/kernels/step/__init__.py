"""Operators of a decoding step other than attention and matrix products.

The lengths of the sequences of a batch stay on the device, so every operator reads lengths, indices and
random numbers from tensors. The definitions are plain torch and may loop in Python. The Triton kernels
(``*_kernels``) for CUDA tensors never synchronise with the host and can be captured in CUDA graphs.
"""

from triforce_tree.kernels.step.accept import accept_greedy, second_choice
from triforce_tree.kernels.step.grow import begin_tree, expand_nodes, place_nodes
from triforce_tree.kernels.step.kv_slots import append_kv, chunk_means, move_kv
from triforce_tree.kernels.step.select import select_chunks
from triforce_tree.kernels.step.traversal import traverse_tree

__all__ = [
    "accept_greedy",
    "append_kv",
    "begin_tree",
    "chunk_means",
    "expand_nodes",
    "move_kv",
    "place_nodes",
    "second_choice",
    "select_chunks",
    "traverse_tree",
]
