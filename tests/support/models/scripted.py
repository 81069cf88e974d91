"""Models that say what a test wants: after each token of a script comes the next one."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase


def scripted(
    tokenizer: PreTrainedTokenizerBase, script: Sequence[int], eos_token_id: int | list[int] | None = None
) -> LlamaForCausalLM:
    """Returns a model whose greedy text goes through the script, whose tokens differ; its last token repeats
    itself.

    Other tokens are unlikely, in an order of their own after each token.
    """
    assert len(set(script)) == len(script)
    size = -(-len(tokenizer) // 8) * 8
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=eos_token_id, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        # A token's hidden state is its own direction alone.
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(tokenizer)])
        model.lm_head.weight.copy_(torch.rand(len(tokenizer), size) / 8)
        for before, after in [*pairwise(script), (script[-1], script[-1])]:
            model.lm_head.weight[after, before] = 1.0
    return model
