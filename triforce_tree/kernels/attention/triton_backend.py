"""The attention backend of this project's Triton kernels, the default on a GPU."""

from typing import Any

import torch

from triforce_tree.kernels.attention.backend import Attention, AttentionBackend, Capabilities
from triforce_tree.kernels.attention.plan import Heads, Plan
from triforce_tree.kernels.attention.prefixes import PrefixPlan


class TritonBackend(AttentionBackend):
    """The backend "triton". It imports ``launch`` at the first use, because Triton may not be installed."""

    name = "triton"
    can = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_bits=(16, 8),
        captures=True,
        exact=True,
        pieces=True,
        prefixes=True,
        blocks=True,
    )

    def missing(self) -> str | None:
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton is not installed; install it, or run on the CPU (device='cpu')"
        return None

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        from triforce_tree.kernels.attention import launch

        return launch.prepare(plan, dtype, kv_dtype, page)

    def prefixes(
        self, plan: PrefixPlan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        from triforce_tree.kernels.attention import launch

        made = (launch.prepare(each, dtype, kv_dtype, page) for each in (plan.own, plan.shared))
        return launch.PrefixAttention(*made)

    def pieces(
        self, heads: Heads, queries: int, positions: int, most: int, device: torch.device, dtype: torch.dtype
    ) -> list[Attention]:
        from triforce_tree.kernels.attention import launch

        return [*launch.prepare_pieces(heads, queries, positions, most, device=device, dtype=dtype)]

    @property
    def exact(self) -> Any:
        from triforce_tree.kernels.attention.exact import launch

        return launch
