"""Defines attention backends, which implement attention over KV slots.

A KV view makes one :class:`Attention` for each kind of heads. It calls ``begin`` before the first layer of
each forward, so that a backend can plan by the lengths and masks of the forward, and ``run`` in each layer. A
new backend is a module with a subclass of :class:`AttentionBackend` and a line in ``_REGISTERED``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, Plan
from triforce_tree.kernels.attention.prefixes import PrefixPlan

# The module and the class of each backend. A module is imported at the first use of its backend, because a
# package that it needs may not be installed.
_REGISTERED = {
    "triton": ("triforce_tree.kernels.attention.triton_backend", "TritonBackend"),
    "cpu": ("triforce_tree.kernels.cpu.backend", "CpuBackend"),
    "flashinfer": ("triforce_tree.kernels.attention.flashinfer_backend", "FlashInferBackend"),
}
_DEFAULTS = {"cuda": "triton"}


@dataclass(frozen=True)
class Capabilities:
    """Features of a backend.

    Attributes:
        devices: types of torch devices.
        dtypes: dtypes of queries, and of keys and values that are not in 8 bits.
        kv_bits: bits of keys and values.
        head_dims: supported numbers of elements of a head, D and D_v, which must be equal; None for any.
        tree_mask: whether each query may see a different selection of the tail. A backend without tree masks
            supports only chains.
        lse: whether it returns the log-sum-exp, by which partial outputs are merged.
        captures: whether a CUDA graph can capture a call, because it never waits for the device and reads
            lengths and masks from the buffers of the plan. True on a CPU, which has no CUDA graphs.
        fewer_queries: whether a call may have only the first queries of each sequence.
        exact: whether it has ``exact``, whose results do not depend on other queries, bit for bit.
        pieces: whether it has ``pieces``, which caches in host memory need.
        prefixes: whether it has ``prefixes``. Without it, a shared prefix is read for each of its sequences.
        blocks: whether it attends to a tree of texts by blocks of queries (``kernels/attention/blocks``).
            Without it, each query has a table of its own.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kv_bits: tuple[int, ...] = (16,)
    head_dims: tuple[int, ...] | None = None
    tree_mask: bool = True
    lse: bool = True
    captures: bool = False
    fewer_queries: bool = False
    exact: bool = False
    pieces: bool = False
    prefixes: bool = False
    blocks: bool = False


class Attention(Protocol):
    """Computes the attention of the queries of one plan."""

    @property
    def plan(self) -> Plan: ...

    def over(self, plan: Plan) -> Self:
        """Returns this attention with another plan of the same sizes; both may share workspace."""

    def begin(self) -> None:
        """Prepares a forward; called before its first layer, after the buffers of the plan were written."""

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        """Computes the attention of all queries in one layer.

        Args:
            q: ``[queries, H_q, D]``, rotated; the last dimension is dense.
            kv: keys and values of the layer, including the new tokens.
            params: scale, softcap and sinks; its window is not read, see ``first`` and the mask of the plan.
            first: first position that each query sees (sliding windows); None for 0.

        Returns:
            ``[queries, H_q, D_v]`` in q's dtype.
        """

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the output of :meth:`run` and its log-sum-exp (natural logarithm), fp32 ``[queries, H_q]``.

        A query that sees no position has the output 0 and the log-sum-exp -inf.
        """


class AttentionBackend:
    """Base class of backends; a subclass must implement :meth:`trees`.

    Attributes:
        name: value of the option ``attention_backend``.
        can: features of the backend.
    """

    name: ClassVar[str]
    can: ClassVar[Capabilities]

    def missing(self) -> str | None:
        """Returns why the backend cannot be used here, such as a missing package, or None if it can."""
        return None

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        """Returns attention with a plan from ``plan_trees``.

        Args:
            dtype: dtype of queries, keys and values.
            kv_dtype: dtype of keys and values if it differs from ``dtype``: int8.
            page: KV slots of a page in most layers; 0 for keys and values without pages.
        """
        raise NotImplementedError

    def prefixes(
        self, plan: PrefixPlan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        """Returns attention to pages of keys and values that reads the prefixes of sequences once.

        :meth:`trees` describes the arguments.
        """
        raise NotImplementedError

    def pieces(
        self, heads: Heads, queries: int, positions: int, most: int, device: torch.device, dtype: torch.dtype
    ) -> list[Attention]:
        """Returns attention to 1, 2, ... ``most`` pieces of ``positions`` KV positions.

        Each piece has its own copy of the queries. Its result does not depend on the number of pieces.
        """
        raise NotImplementedError

    @property
    def exact(self) -> Any:
        """Returns a module with ``attention(ExactAttention)`` and ``near(lengths, mask, tokens)``."""
        raise NotImplementedError


def register(name: str, module: str, kind: str) -> None:
    """Registers the class ``kind`` of a module as the backend ``name``."""
    _REGISTERED[name] = module, kind


def names() -> list[str]:
    """Returns the names of all backends."""
    return list(_REGISTERED)


@cache
def backend(name: str) -> AttentionBackend:
    """Returns the backend of this name."""
    module, kind = _REGISTERED[name]
    made: Callable[[], AttentionBackend] = getattr(import_module(module), kind)
    return made()


def chosen(name: str, device: torch.device) -> AttentionBackend:
    """Returns the backend with this name; for "auto" the device's default."""
    return backend(_DEFAULTS.get(device.type, "cpu") if name == "auto" else name)


def refuse(
    name: str, device: torch.device, dtype: torch.dtype, heads: set[Heads], options: dict[str, bool | int]
) -> None:
    """Raises ValueError if a backend does not support the attention of a model with these settings.

    Args:
        name: name of the backend, or "auto".
        device, dtype, heads: of the model's attention.
        options: values of ``kv_bits``, ``exact`` and ``offload``.
    """
    if name == "auto":
        return
    if name not in _REGISTERED:
        raise ValueError(f"attention_backend={name!r} is not known; use auto, {', '.join(_REGISTERED)}")
    made, given = backend(name), f"attention_backend={name!r}"
    can, remedy = made.can, "leave out attention_backend"
    if device.type not in can.devices:
        raise ValueError(f"{given} runs on {' and '.join(can.devices)}, not on {device.type}; {remedy}")
    if reason := made.missing():
        raise ValueError(f"{given}: {reason}")
    if dtype not in can.dtypes:
        raise ValueError(f"{given} does not support models in {dtype}; {remedy}")
    if options["kv_bits"] not in can.kv_bits:
        raise ValueError(f"{given} does not work with kv_bits={options['kv_bits']}; leave one of them out")
    if options["exact"] and not can.exact:
        raise ValueError(f"{given} does not work with exact=True; leave one of them out")
    if options["offload"] and not can.pieces:
        raise ValueError(f"{given} does not work with an offloaded cache; leave one of them out")
    if not (can.tree_mask and can.lse):
        raise ValueError(f"{given} has no tree masks, or no log-sum-exp; {remedy}")
    for one in heads:
        if can.head_dims is not None and not (one.dim == one.value_dim and one.dim in can.head_dims):
            raise ValueError(
                f"{given} does not support heads of {one.dim} and {one.value_dim} elements, only "
                f"{', '.join(map(str, can.head_dims))}; {remedy}"
            )
