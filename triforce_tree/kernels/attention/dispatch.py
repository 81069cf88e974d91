"""Tree attention given a mask, dispatched by device.

CUDA tensors go to the Triton kernels, everything else to the torch reference that defines them.
Triton is imported at the first use, so that machines without it can import the package.
"""

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from triforce_tree.kernels.attention import reference

# Plans by mask, kept as long as the mask tensor lives.
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.tree_attention``."""
    if not q.is_cuda:
        return reference.tree_attention(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)
    return _planned(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)


def _planned(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, first: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    """One call with a plan, which is cached by the mask and so shared by the layers of a forward."""
    from triforce_tree.kernels.attention.launch import run
    from triforce_tree.kernels.attention.plan import Heads, plan_trees

    batch, q_heads, queries, dim = q.shape
    version = 0 if mask.is_inference() else mask._version
    key = (batch, q_heads, k.shape[1], dim, v.shape[3], k.shape[2], q.dtype, version)
    plans = _plans.setdefault(mask, {})
    if key not in plans:
        plans[key] = plan_trees(
            Heads(q_heads, k.shape[1], dim, v.shape[3]),
            [mask] * batch,
            [k.shape[2] - mask.shape[1]] * batch,
            device=q.device,
            dtype=q.dtype,
        )
    if first is not None and batch > 1:
        first = first.repeat(batch)
    packed = q.transpose(1, 2).reshape(batch * queries, q_heads, dim)
    out, lse = run(packed, k, v, plans[key], first=first, **how)
    out = out.view(batch, queries, q_heads, -1).transpose(1, 2)
    return out, lse.view(batch, queries, q_heads).transpose(1, 2)
