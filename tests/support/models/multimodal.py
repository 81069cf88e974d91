"""Tiny random models of images and text, whose encoders have as many layers as their decoders."""

from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from tests.support.models.families import VOCABULARY, tiny

# Token ids of images, which prompts of text do not hold.
IMAGE, VIDEO, START, END = range(VOCABULARY - 1, VOCABULARY - 5, -1)
TEXT = END
"""Ids below this are of text."""

_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 14}
_TOWER = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
_QWEN = {**_VISION, "out_hidden_size": 32, "depth": 2, "num_heads": 2}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}

# name -> (configuration class, model class, family of the text model, its settings, vision, settings)
MULTIMODAL: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {},
        _TOWER,
        {
            "mm_tokens_per_image": 1,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
    ),
    # It may have an encoder of sound, and has none here.
    "gemma4": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {"pad_token_id": 0},
        {**_TOWER, "head_dim": 8},
        {"image_token_id": IMAGE, "audio_token_id": VIDEO},
    ),
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        "mistral",
        {"head_dim": 8},
        {**_TOWER, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": IMAGE},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2",
        {"rope_parameters": _MROPE},
        _QWEN,
        _QWEN_IDS,
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"rope_parameters": _MROPE},
        {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _QWEN_IDS,
    ),
}


def multimodal(name: str, seed: int = 0) -> PreTrainedModel:
    """Returns a random model; the same seed gives the same weights."""
    config_name, model_name, family, text, vision, own = MULTIMODAL[name]
    settings = tiny(family, **text).config.to_diff_dict()
    config = getattr(hf, config_name)(
        text_config=settings, vision_config=vision, tie_word_embeddings=False, initializer_range=0.2, **own
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(hf, model_name)(config)
    return model.float().eval()
