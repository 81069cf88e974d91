"""A transformers cache that stores nothing and passes new keys and values through, and its name as an
argument.
"""

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from triforce_tree.models.running_forward import convolve, indexed_pass, running

# The name of the KV cache among the arguments and outputs of a forward, which transformers 5.24 changed.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class PassThrough(Cache):
    """A transformers cache that returns new keys and values to the attention function, which stores them.

    A convolution gets its new inputs preceded by earlier ones. The cache never has a recurrent state, because
    the functions that scan a recurrence (``models/recurrent``) find their state elsewhere.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        return indexed_pass().index_keys(layer_idx, indexer_key_states, running.index_from)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return convolve(conv_states, kwargs["conv_kernel_size"] - 1)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return recurrent_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False
