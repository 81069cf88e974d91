"""transformers' own loops over forwards of ours: a copy of a model that asks its cache for logits."""

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
    """A cache by which transformers reaches forwards of ours."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: transformers then passes whole prompts, and afterwards the newest tokens."""
        return 0

    def step(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Logits ``[rows, V]`` after prompts ``[rows, W]``, then after a new token ``[rows, 1]`` of each."""
        raise NotImplementedError


def with_own_forward(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose forward asks the :class:`OwnForward` that it gets as its cache."""

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
    """Inside, transformers draws by this seed; None leaves torch's global generators as they are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
