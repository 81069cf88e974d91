"""Runs transformers' own generation loops over our forwards, through a copy of a model that gets logits from
its cache.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from triforce_tree.models.recurrent.pass_through import CACHE


class OwnForward(Cache):
    """A cache through which a generation loop of transformers calls our forwards."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0, so that transformers passes whole prompts first and only the newest tokens
        afterwards.
        """
        return 0

    def step(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns logits ``[B, V]`` after prompts ``[B, W]`` in the first call, and after one new token each,
        ``[B, 1]``, in later calls.
        """
        raise NotImplementedError


def with_own_forward(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model whose forward returns the logits of the :class:`OwnForward` that it gets as
    cache.
    """

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **given: Any,
    ) -> CausalLMOutputWithPast:
        cache: OwnForward = given[CACHE]
        logits = cache.step(input_ids, attention_mask)
        out = CausalLMOutputWithPast(logits=logits[:, None])
        out[CACHE] = cache
        return out

    other = copy.copy(model)
    vars(other).update(forward=forward, _compiled_call_impl=None)
    return other


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Returns a context in which torch's global generators use this seed. With None they are left
    unchanged.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
