"""The target that drafters learn from."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.models.hidden_states import hidden_states
from triforce_tree.models.model_copy import decoder_layers, text_decoder


class Teacher:
    """A target whose weights do not change.

    Args:
        model: a model with a linear language model head after an RMS norm, as Llama's.

    Attributes:
        layers, size, heads, kv_heads, head_dim, eps: of its configuration.
        positions: the most tokens of a text.
        end: an end token, 0 where the model has none.
        head: the weight of its language model head, ``[V, H]``.
        last_norm: the weight of its last norm, ``[H]``.

    Raises:
        ValueError: the model has no such head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model.requires_grad_(False)
        self.model, config = model, model.config.get_text_config(decoder=True)
        self.layers, self.size = config.num_hidden_layers, config.hidden_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.size // self.heads
        self.positions: int = config.max_position_embeddings
        ends = config.eos_token_id if config.eos_token_id is not None else 0
        self.end = int(ends[0] if isinstance(ends, list) else ends)
        norm, head = getattr(text_decoder(model), "norm", None), model.get_output_embeddings()
        if norm is None or getattr(head, "bias", None) is not None:
            raise ValueError(
                f"{type(model).__name__} has no language model head without biases after a norm; drafters "
                "are trained for targets such as Llama, Mistral and Qwen"
            )
        self.eps: float = config.rms_norm_eps
        self.head: Tensor = head.weight
        self.last_norm: Tensor = norm.weight
        self._listed = decoder_layers(model)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings of tokens."""
        found: Tensor = self.model.get_input_embeddings()(tokens)
        return found

    @torch.no_grad()
    def states(self, tokens: Tensor, features: Sequence[int]) -> dict[int, Tensor]:
        """Returns hidden states ``[R, T, H]`` of texts ``[R, T]``: those of ``features``, and by the number
        of layers those after the last norm.
        """
        with hidden_states(self.model, self._listed, (*features, self.layers)) as found:
            text_decoder(self.model)(tokens, use_cache=False)
        return dict(found)
