"""Typical acceptance: faster than sampling from the target, and another distribution (lossy)."""

import torch
from torch import Tensor

# Values of Medusa's code (arXiv 2401.10774, section 3.3).
EPSILON, DELTA = 0.09, 0.3


def accept_typical(tokens: Tensor, parents: Tensor, p: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path of a token tree whose tokens the target finds likely enough.

    A token x after the text u is likely enough if ``p(x | u) > min(EPSILON, DELTA exp(-H(p(. | u))))``, with
    the entropy H in nats (Medusa, arXiv 2401.10774, section 3.3). It is not compared with what the draft
    drew it from, so that the text follows a distribution of its own. Of paths of one length the one whose
    last node comes first is taken. All operations are capturable in a CUDA graph.

    Args:
        tokens: int64 ``[B, N]``; node 0 is the root, whose token is not read; -1 marks an absent node.
        parents: int64 ``[B, N]``; -1 for the root, and parents precede their children.
        p: fp32 ``[B, N, V]``, the target's probs at each node.
        depth: length of the longest path below the root; deeper nodes are not read.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, their number, the root included; last int64 ``[B]``, the last of them.
    """
    batch, nodes = tokens.shape
    above = parents.clamp_min(0)
    least = (DELTA * (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1).exp()).clamp_max(EPSILON)
    of_parents = p.gather(1, above[..., None].expand_as(p)).gather(2, tokens.clamp_min(0)[..., None])
    likely = (of_parents[..., 0] > least.gather(1, above)) & (tokens >= 0) & (parents >= 0)
    root = torch.zeros(batch, nodes, dtype=torch.bool, device=p.device)
    root[:, 0] = True
    # A node's level below the root, -1 where it is not reached.
    level = torch.where(root, 0, -1)
    for _ in range(depth):
        before = level.gather(1, above)
        level = torch.where(likely & (before >= 0), before + 1, level)
    order = torch.arange(nodes, 0, -1, device=p.device)
    last = node = (level * nodes + order).argmax(1)
    count = level.gather(1, last[:, None])[:, 0] + 1
    # From the last node up; at the root it stays.
    path = tokens.new_full((batch, depth + 1), -1)
    for _ in range(depth + 1):
        path.scatter_(1, level.gather(1, node[:, None]), node[:, None])
        node = above.gather(1, node[:, None])[:, 0]
    return path, count, last
