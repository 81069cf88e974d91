"""transformers' function for each kind of recurrence, in two forms that use the running forward's state.

The form ``tokens`` computes the tokens of a decoding pass one by one (``kernels.recurrent``), as decoding
token by token does. The form ``chunks`` computes a part of a prompt by transformers' own function, which
starts from the given state and multiplies matrices by chunks; its results are equal up to rounding. Both
return the output of the replaced function, and a second value in place of the final state, which the running
forward has kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triforce_tree.models.running_forward import ScanInputs, convolved, recur, recur_by

Scan = Callable[..., tuple[Tensor, Tensor]]
_EPSILON = 1e-6


def _mamba2_tokens(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *_: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Computes Mamba 2 for ``x`` ``[B, T, H, V]``, ``dt`` ``[B, T, H]``, ``a`` ``[H]``, ``b`` and ``c`` ``[B,
    T, G, K]``.

    Like transformers' function for a single token it ignores limits of ``dt``.
    """
    step = _step(dt, dt_bias, dt_softplus)
    value = x.float() * step[..., None]
    out = recur(ScanInputs(c.float(), b.float(), value, (step * a.float())[..., None]))
    if D is not None:
        out = out + x.float() * D[..., None]
    return out.to(x.dtype), dt


def _mamba2_chunks(own: Callable[..., Any]) -> Scan:
    return _chunks(
        lambda state, *args, **keywords: own(
            *args, **{**keywords, "initial_states": state, "return_final_states": True}
        )
    )


def _chunks(compute: Callable[..., tuple[Tensor, Tensor]]) -> Scan:
    """Returns the form in chunks of a function ``compute(state, x, ...)``, which returns the output and the
    final state.
    """

    def scan(x: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []

        def step(state: Tensor | None) -> Tensor:
            y, final = compute(state, x, *args, **keywords)
            out.append(y)
            return final

        recur_by(step)
        return out[0], x

    return scan


def _delta_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Computes the delta rule for ``q``, ``k`` ``[B, T, G, K]``, ``v`` ``[B, T, H, V]``, ``g`` ``[B, T, H]``
    or ``[B, T, H, K]``.
    """
    query, key = q.float(), k.float()
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    decay = g.float() if g.dim() == 4 else g.float()[..., None]
    inputs = ScanInputs(query / query.shape[-1] ** 0.5, key, v.float(), decay, beta=beta.float())
    return recur(inputs).to(v.dtype), g


def _delta_chunks(own: Callable[..., Any]) -> Scan:
    def compute(state: Tensor | None, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        # transformers keeps this state with keys first.
        first = None if state is None else state.transpose(-1, -2).contiguous()
        y, final = own(*args, **{**keywords, "initial_state": first, "output_final_state": True})
        return y, final.transpose(-1, -2)

    return _chunks(compute)


def _mamba_tokens(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Computes Mamba (one head) for ``x``, ``dt`` and ``z`` ``[B, V, T]``, ``a`` ``[V, K]``, ``b`` and ``c``
    ``[B, K, T]``.
    """
    bias = None if delta_bias is None else delta_bias[:, None]
    step = _step(dt, bias, delta_softplus)
    value, decay, key, query = (
        t.transpose(1, 2)[:, :, None].contiguous() for t in (x.float() * step, step, b.float(), c.float())
    )
    out = recur(ScanInputs(query, key, value, decay, a.float()[None]))[:, :, 0].transpose(1, 2)
    if D is not None:
        out = out + x.float() * D[:, None]
    if z is not None:
        out = out * functional.silu(z.float())
    return out.to(x.dtype), dt


def convolution_tokens(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a causal convolution over a decoding pass, in place of transformers' own.

    It has no default arguments: a compiler guards those of the function that it replaces.
    """

    def convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, **keywords: Any) -> Tensor:
        return convolved(own, inputs, weight, bias, keywords.get("activation"))

    return convolution


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = dt if bias is None else dt + bias.to(dt.dtype)
    return (functional.softplus(step) if softplus else step).float()


SCANS: dict[str, tuple[Scan, Callable[[Callable[..., Any]], Scan]]] = {
    "mamba2_chunk_scan": (_mamba2_tokens, _mamba2_chunks),
    # transformers' own function takes no initial state.
    "mamba_selective_scan": (_mamba_tokens, lambda own: _mamba_tokens),
    "torch_chunk_gated_delta_rule": (_delta_tokens, _delta_chunks),
    "chunk_kimi_delta_attention": (_delta_tokens, _delta_chunks),
}
"""By the name in transformers' modules: the form in tokens, and what makes the form in chunks."""
