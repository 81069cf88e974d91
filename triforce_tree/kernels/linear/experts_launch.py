"""Launches the kernel of linear layers of routed experts."""

import torch
import triton
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.linear import experts
from triforce_tree.kernels.linear.configs import LinearConfig, shared_bytes, smaller
from triforce_tree.kernels.linear.experts_kernel import expert_linear_kernel
from triforce_tree.kernels.linear.launch import _packed_scales, _unpacking

MOST_PAIRS = 512
"""Largest number of pairs of token and expert of one launch, because each program reads all of them."""

_BLOCK_M = 16
_CONFIGS = {
    16: LinearConfig(64, 128, 1, 4, 4, tma=False),
    8: LinearConfig(64, 128, 1, 4, 3, tma=False),
    4: LinearConfig(64, 128, 1, 4, 3, tma=False),
}


def expert_linear(
    x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """See ``linear.experts.expert_linear``; dtypes other than bf16 and fp16 run its definition."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return experts.expert_linear.definition(x, ids, words, scales, bias, bits)
    _check(x, ids, words, scales, bits)
    tokens, per_token = ids.shape
    out = torch.empty(tokens * per_token, words.shape[1], dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    together = max(1, MOST_PAIRS // per_token)
    per_row = ids.numel() // max(1, x.shape[0])
    for first in range(0, tokens, together):
        some = ids[first : first + together].reshape(-1)
        start = first * per_token
        rows = x[start // per_row : (start + some.numel()) // per_row]
        _launch(out[start : start + some.numel()], rows, some, words, scales, bias, bits, per_row)
    return out


def _launch(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    words: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    bits: int,
    per_row: int,
) -> None:
    device = describe(x.device)
    count, outs, length = words.shape
    config: LinearConfig = _CONFIGS[bits]
    while shared_bytes(config, bits, _BLOCK_M, device) > device.shared_bytes:
        less = smaller(config)
        assert less is not None, "the smallest tile fits every GPU"
        config = less

    def multiply(cfg: LinearConfig) -> None:
        options = {} if knobs.runtime.interpret else {"num_warps": cfg.warps}
        made = expert_linear_kernel[(triton.cdiv(outs, cfg.block_n), ids.numel())](
            out, x, ids, words, _packed_scales(scales, bits), bias,
            ids.numel(), outs, x.shape[1], length, count * outs,
            x.stride(0), words.stride(0), words.stride(1), words.stride(2),
            PER_ROW=per_row, BITS=bits, BLOCK_P=max(16, triton.next_power_of_2(ids.numel())),
            BLOCK_M=_BLOCK_M, BLOCK_N=cfg.block_n, WIDTH=cfg.width, STAGES=cfg.stages,
            ASM=_unpacking(device), **options,
        )  # fmt: skip
        within(made, device)

    fitted(config, smaller, multiply)


def _check(x: Tensor, ids: Tensor, words: Tensor, scales: Tensor | None, bits: int) -> None:
    count, outs, length = words.shape
    if ids.ndim != 2 or x.shape[0] not in (ids.shape[0], ids.numel()):
        raise ValueError(f"ids {list(ids.shape)} do not route {x.shape[0]} rows; give [tokens, experts each]")
    if bits == 16 and (words.dtype != x.dtype or length != x.shape[1]):
        raise ValueError(f"weights are {words.dtype} [..., {length}]; x is {x.dtype} [..., {x.shape[1]}]")
    if bits < 16 and (words.dtype != torch.int16 or scales is None or length * 16 < x.shape[1] * bits):
        raise ValueError(f"words {words.dtype} [{count}, {outs}, {length}] do not hold {x.shape[1]} columns")
