"""Sums and merged attention over the ranks of a group: small ones over peer memory, else by NCCL or gloo."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.ranks.peers import merge_with_peers, sum_with_peers
from triforce_tree.runtime.distributed import (
    Group,
    all_gather_tensor,
    all_reduce_tensor,
    tensor_group,
    traffic,
)


@torch.library.custom_op("triforce_tree::all_reduce", mutates_args=())
def all_reduce(x: Tensor, size: int = 0) -> Tensor:
    """The sum over the tensor group of ``size`` processes, by default over all.

    It is opaque to torch.compile, and capturable in a CUDA graph.
    """
    group = tensor_group(size)
    if group is not None and (peers := group.peers) is not None and peers.takes(x):
        traffic.add("all_reduce", x)
        return sum_with_peers(x.contiguous(), peers.memories, peers.calls, peers.rank)
    return all_reduce_tensor(x.clone(memory_format=torch.contiguous_format), group)


@all_reduce.register_fake
def _(x: Tensor, size: int = 0) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def merged_over_ranks(out: Tensor, lse: Tensor, group: Group) -> Tensor:
    """Attention to the keys of all ranks of a group, from that to this rank's: one collective.

    Every rank gathers the same bytes and merges them in the same order: results are equal to the bit.

    Args:
        out: ``[..., D]``; zeros where this rank has no keys.
        lse: fp32 ``[...]``, natural log-sum-exps; -inf where it has none.

    Returns:
        ``[..., D]`` in the dtype of ``out``.
    """
    out, lse = out.contiguous(), lse.float().contiguous()
    if (peers := group.peers) is not None and peers.takes_rows(out):
        traffic.add("all_gather", out)
        return merge_with_peers(out, lse, peers.memories, peers.calls, peers.rank)
    width = out.shape[-1] * out.itemsize
    # Bytes: gloo does not gather all dtypes, and one message takes less time than two.
    parts = out.view(torch.uint8), lse[..., None].view(torch.uint8)
    gathered = all_gather_tensor(torch.cat(parts, -1), group)
    outs = gathered[..., :width].contiguous().view(out.dtype)
    lses = gathered[..., width:].contiguous().view(torch.float32)[..., 0]
    return merge_states(outs, lses)[0]


def merged_bytes(queries: int, heads: int, value_dim: int, itemsize: int) -> int:
    """Bytes that a rank hands over in one :func:`merged_over_ranks`, once a layer and forward."""
    return queries * heads * (value_dim * itemsize + 4)
