"""Launches of the kernels of a prefill's layers, as ``variants`` has them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from triforce_tree.kernels.attention.merge import merge_parts
from triforce_tree.kernels.pointwise import launch
from triforce_tree.kernels.pointwise.reference import ACTIVATIONS

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Returns names and calls."""
    for (dtype, name), dim in product(NAMES.items(), (64, 256, 512)):
        q, lse = torch.zeros(1, 16, 2, dim, dtype=dtype).transpose(1, 2), torch.zeros(1, 2, 16)
        yield f"merge of parts, {name}, head_dim {dim}", partial(merge_parts, [q] * 3, [lse] * 3)
        for width, wide in product((dim, dim // 4), (torch.float32, dtype)):
            cos = torch.zeros(1, 16, width, dtype=wide)
            label = f"rotary, {name} and {NAMES[wide]}, {width} of {dim} elements"
            yield label, partial(launch.rotary, q, q, cos, cos)
    for (dtype, name), activation in product(NAMES.items(), ACTIVATIONS):
        halves = torch.zeros(16, 22_016, dtype=dtype).chunk(2, -1)
        yield f"gated, {name}, {activation}", partial(launch.gated, *halves, activation)  # type: ignore[call-arg]
