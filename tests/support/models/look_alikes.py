"""Small models whose layers kernels compute, and modules that look like theirs."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def made(config: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """Returns a random model of a configuration's class, whose norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype)
    return model


class DoubledNorm(nn.Module):
    """Looks like an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
