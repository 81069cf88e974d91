"""Sums and merged attention over ranks, by peer memory for small tensors, else by NCCL or gloo."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.ranks.peers import merge_with_peers, sum_with_peers
from triforce_tree.runtime.distributed import (
    Group,
    all_gather_tensor,
    all_reduce_tensor,
    tensor_group,
    traffic,
)


@operator("all_reduce")
def all_reduce(x: Tensor, size: int = 0) -> Tensor:
    """Returns the sum of x over the tensor group of ``size`` processes, or over all processes if 0.

    It is opaque to torch.compile, and a CUDA graph can capture it.
    """
    group = tensor_group(size)
    if group is not None and (peers := group.peers) is not None and peers.takes(x):
        traffic.add("all_reduce", x)
        return sum_with_peers(x.contiguous(), peers.memories, peers.calls, peers.rank)
    return all_reduce_tensor(x.clone(memory_format=torch.contiguous_format), group)


@fake("all_reduce")
def _(x: Tensor, size: int = 0) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def merged_over_ranks(out: Tensor, lse: Tensor, group: Group) -> Tensor:
    """Merges the attention to the keys of each rank of a group by one collective.

    Every rank gathers the same bytes and merges them in the same order, so all ranks have the same result,
    bit for bit.

    Args:
        out: ``[..., D]``, attention to the keys of this rank; zeros if it has no keys.
        lse: fp32 ``[...]``, log-sum-exps (natural logarithm); -inf if this rank has no keys.

    Returns:
        ``[..., D]`` in the dtype of ``out``.
    """
    out, lse = out.contiguous(), lse.float().contiguous()
    if (peers := group.peers) is not None and peers.takes_rows(out):
        traffic.add("all_gather", out)
        return merge_with_peers(out, lse, peers.memories, peers.calls, peers.rank)
    width = out.shape[-1] * out.itemsize
    # Both are gathered as bytes: gloo does not support all dtypes, and one message takes less time than two.
    parts = out.view(torch.uint8), lse[..., None].view(torch.uint8)
    gathered = all_gather_tensor(torch.cat(parts, -1), group)
    outs = gathered[..., :width].contiguous().view(out.dtype)
    lses = gathered[..., width:].contiguous().view(torch.float32)[..., 0]
    return merge_states(outs, lses)[0]


def merged_bytes(queries: int, heads: int, value_dim: int, itemsize: int) -> int:
    """Returns the bytes that a rank sends in one :func:`merged_over_ranks` (once per layer and forward)."""
    return queries * heads * (value_dim * itemsize + 4)
