"""Tiny random models with recurrent layers, and a drafter that knows most of what they will say."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.models.families import VOCABULARY, small
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_HEAD = {"head_dim": 8}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_SHORT = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}

# name -> (prefix of the configuration's and of the model's class, settings)
RECURRENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", "Qwen3Next", _DELTA | _HEAD | _EXPERTS),
    "qwen3.5": ("Qwen3_5Text", "Qwen3_5", _DELTA | _HEAD),
    "qwen3.5-moe": ("Qwen3_5MoeText", "Qwen3_5Moe", _DELTA | _HEAD | _EXPERTS),
    "olmo-hybrid": ("OlmoHybrid", "OlmoHybrid", _DELTA),
    "granite-4": (
        "GraniteMoeHybrid",
        "GraniteMoeHybrid",
        {
            **_MAMBA_2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "bamba": ("Bamba", "Bamba", _MAMBA_2 | {"attn_layer_indices": [1], "attn_rotary_emb": 8}),
    "falcon-h1": ("FalconH1", "FalconH1", _MAMBA_2 | _HEAD | {"mamba_d_ssm": 64}),
    "nemotron-h": (
        "NemotronH",
        "NemotronH",
        {
            **_HEAD,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        },
    ),
    "jamba": (
        "Jamba",
        "Jamba",
        {
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        "KimiLinear",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "layer_types": _DELTA["layer_types"],
        },
    ),
    "lfm2": ("Lfm2", "Lfm2", _SHORT),
    "lfm2-moe": ("Lfm2Moe", "Lfm2Moe", _SHORT | _EXPERTS | {"num_dense_layers": 1}),
}


def recurrent(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Returns a random model of a family; the same seed gives the same weights."""
    config, model, own = RECURRENT[family]
    settings = {"num_hidden_layers": 4, **own, **overrides}
    return small(f"{config}Config", f"{model}ForCausalLM", seed=seed, **settings)


class Foreknowledge(Drafter):
    """Proposes the known continuation of each sequence, with a mistake at every position that it is given.

    Args:
        known: prompts and their continuations.
        wrong: positions with a wrong token, of each sequence.
        length: of the proposed chain.
    """

    name = "foreknowledge"
    deterministic = True

    def __init__(self, known: Sequence[Sequence[int]], wrong: Sequence[set[int]], length: int) -> None:
        self.tree, self.length = f"chain:{length}", length
        self._texts = [
            [(token + (at in mistakes)) % VOCABULARY for at, token in enumerate(text)]
            for text, mistakes in zip(known, wrong, strict=True)
        ]

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        tree.tokens[:, 1:] = -1
        for b, (text, end) in enumerate(zip(self._texts, state.end.tolist(), strict=True)):
            coming = torch.tensor(text[end + 1 :][: self.length], dtype=torch.int64, device=state.device)
            tree.tokens[b, 1 : 1 + len(coming)] = coming


class ForeknownPath(Drafter):
    """Proposes trees with the known continuation of each sequence on one of their paths.

    It is on another path for each position; all other nodes are wrong.

    Args:
        known: prompts and their continuations.
    """

    name = "foreknown path"
    deterministic = True
    tree = "static:0;1;0.0;1.0;1.1;0.0.0;1.0.0;1.1.0;1.1.1"
    _PATHS = ((1, 3, 6), (2, 4, 7), (2, 5, 8), (2, 5, 9), (1, 3), (2, 5), (2,), ())

    def __init__(self, known: Sequence[Sequence[int]]) -> None:
        self.known = known

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        for b, (text, end) in enumerate(zip(self.known, state.end.tolist(), strict=True)):
            coming = [*text[end + 1 :], 0, 0, 0]
            path = self._PATHS[end % len(self._PATHS)]
            for node in range(1, tree.nodes):
                depth = int(tree.depths[node])
                # Siblings have different numbers, and so different tokens.
                wrong = (coming[depth - 1] + node) % VOCABULARY
                tree.tokens[b, node] = coming[depth - 1] if node in path else wrong
