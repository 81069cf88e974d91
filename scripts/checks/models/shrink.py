"""Makes any configuration of transformers tiny, by the names and values of its fields.

The result is what differs from the configuration's defaults, as keywords of its class: all else, and with it
whatever is special about a family, stays as transformers has it.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 96
PLAIN_TOKENS = 64
"""Prompts are drawn from the first ids; placeholders of images and other special tokens are above."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, POSITIONS = 32, 4, 2, 8, 48, 512
WINDOW, CHUNK, ORIGINAL, SCALE_FROM = 40, 48, 64, 56
MOST_LAYERS = 6

Settings = dict[str, Any]
_TEXT = re.compile("(^|_)(text|llm|language|decoder|thinker|lm)(_|$)")
_SPECIAL = re.compile(
    "(_token|token_id|token_index)(_id|_index|_list)?$|_token_ids?$|^vision_(start|end)_id$"
)
# First match wins. The value for a field whose default is a number (not a bool), by its name.
_RULES: Sequence[tuple[str, int]] = (
    ("vocab_size|vocab_size_per_layer_input|embedding_size_total", VOCABULARY),
    ("num_hidden_layers|n_layers?|num_layers|depth|.*_layers|num_.*_layers", 2),
    ("num_key_value_heads|.*_num_key_value_heads|num_kv_heads|n_head_kv|linear_num_key_heads", KV_HEADS),
    ("index_n_heads", 16),
    ("index_num_heads", 2),
    ("(.*_)?(n|num)_(attention_)?heads?|n_head|.*_attention_heads|linear_num_value_heads|num_heads", HEADS),
    ("qk_nope_head_dim|index_head_dim|linear_.*_head_dim|linear_head_dim", 8),
    ("qk_rope_head_dim", 4),
    ("v_head_dim|swa_v_head_dim", 6),
    ("(.*_)?head_dim|d_kv|attention_head_dim|query_pre_attn_scalar|kv_channels|.*head_size", HEAD_DIM),
    ("q_lora_rank", 16),
    ("kv_lora_rank|.*_lora_rank|laurel_rank|.*_lowrank|.*lora_dim|.*_rank", 8),
    ("index_topk|.*_topk_tokens", 24),
    ("sliding_window(_size)?|local_attention|attention_window(_size)?|window_size", WINDOW),
    ("attention_chunk_size", CHUNK),
    ("floor_scale", SCALE_FROM),
    ("original_max_position_embeddings|.*original_max.*", ORIGINAL),
    ("(.*_)?max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len|n_ctx", POSITIONS),
    ("(num|n)(_local|_routed)?_experts|moe_num_experts|.*num_experts", 4),
    ("num_experts_per_tok(en)?|moe_topk|moe_top_?k|num_experts_per_.*|moe_k|top_k_experts", 2),
    ("n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    ("n_group|num_expert_group|topk_group|n_limited_groups", 1),
    ("first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    ("moe_.*intermediate_size|.*expert.*(intermediate|ffn|hidden)_size|expert_dim|moe_ffn.*size", 16),
    (".*(intermediate|ffn|inner|mlp).*(size|dim)|d_ff|n_inner|decoder_ffn_dim|encoder_ffn_dim", INNER),
    ("hidden_size_per_layer_input", 8),
    ("patch_size", 14),
    ("image_size|img_size", 28),
    ("(.*_)?(hidden_size|hidden_dim)|d_model|n_embd|embed_dim|embedding_size|dim|emb_dim|width", HIDDEN),
    (".*(projection|projector|out|output|proj)_(dim|size|hidden_size)|out_dim|word_embed_proj_dim", HIDDEN),
    ("num_kv_shared_layers", 2),
)  # fmt: skip
_COMPILED = [(re.compile(pattern), value) for pattern, value in _RULES]


def shrunk(config: PreTrainedConfig, text: bool = True) -> Settings:
    """Keywords that make a tiny configuration of the same class.

    Args:
        config: of default values.
        text: whether it is, or contains, the language model's; else a part that text alone never calls.
    """
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    parts = {name for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    found: Settings = {}
    for name in parts:
        inner = text and (bool(_TEXT.search(name)) or not any(_TEXT.search(part) for part in parts))
        part = fields[name]
        found[name] = shrunk(part, inner) | {"model_type": part.model_type}
    layers = _Layers(fields)
    reserved = _Reserved()
    for name, value in fields.items():
        if name in parts or name in ("id2label", "label2id", "num_labels"):
            continue
        if _SPECIAL.search(name) and type(value) is int:
            found[name] = reserved.next()
        elif (new := layers.of(name, value)) is not None:
            found[name] = new
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            continue
        elif name == "tie_word_embeddings":
            # Random tied weights repeat their input.
            found[name] = False
        elif name in ("is_decoder", "use_cache") and value is False:
            found[name] = True
        elif name == "head_dim" and value is None:
            found[name] = HEAD_DIM
        elif name in ("num_key_value_heads",) and value is None:
            found[name] = KV_HEADS
        elif type(value) is int and value > 0:
            smaller = next((least for rule, least in _COMPILED if rule.fullmatch(name)), None)
            if smaller is not None:
                found[name] = smaller
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = HEADS
        if fields.get("head_dim") == fields.get("qk_rope_head_dim") and "qk_rope_head_dim" in found:
            found["head_dim"] = found["qk_rope_head_dim"]
    elif fields.get("num_key_value_heads") == 1:
        found["num_key_value_heads"] = 1
    for name in ("qk_head_dim", "num_labels"):
        found.pop(name, None)
    return found


class _Reserved:
    """Ids of special tokens, each its own where there are enough."""

    def __init__(self) -> None:
        self._next = PLAIN_TOKENS

    def next(self) -> int:
        self._next = min(self._next + 1, VOCABULARY - 1)
        return self._next


class _Layers:
    """Chooses the layers of a tiny model: the first of each kind, and at least two.

    The kind of a layer is what all lists with one entry a layer say of it.
    """

    def __init__(self, fields: Settings) -> None:
        counts = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
        self._counts = [name for name in counts if type(fields.get(name)) is int]
        count = fields[self._counts[0]] if self._counts else 0
        self._lists = {
            name: value
            for name, value in fields.items()
            if isinstance(value, list | tuple) and len(value) == count and count > 2 and _plain(value)
        }
        kinds: dict[Any, int] = {}
        for index in range(count if self._lists else 0):
            kinds.setdefault(tuple(repr(value[index]) for value in self._lists.values()), index)
        self._chosen = sorted(list(kinds.values())[:MOST_LAYERS])
        if self._chosen and len(self._chosen) < 3:
            self._chosen = self._chosen * 2

    def of(self, name: str, value: Any) -> Any:
        """Returns the tiny value of a number of layers, or of a list with an entry a layer; None for all
        else.
        """
        if not self._chosen:
            return None
        if name in self._lists:
            return [value[index] for index in self._chosen]
        return len(self._chosen) if name in self._counts else None


def _plain(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str | int | float | bool) or value is None for value in values)


def merged(settings: Settings, more: Settings) -> Settings:
    """``more`` over ``settings``, dictionaries part by part; ``DROP`` removes a field."""
    found = dict(settings)
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict) and not name.startswith("rope_"):
            found[name] = merged(found[name], value)
        elif value is DROP:
            found.pop(name, None)
        else:
            found[name] = value
    return found


# Marks a field of an override that is to keep transformers' default.
DROP = object()
