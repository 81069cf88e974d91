"""The embedded pair on a GPU, and a long text for it."""

from functools import cache
from typing import Any

import torch

from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine, load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer

# Rounds of drafting are fixed: measured times would often choose plain decoding for so small a model.
FIXED: dict[str, Any] = {
    "levels": 3, "gamma": 8, "tree": "best-first:6,4,3", "budget": 512, "recent": 128, "rounds": 2,
}  # fmt: skip

# For the inflated pair, whose cache or weights are in host memory.
OFFLOADED: dict[str, Any] = {
    "levels": 3, "gamma": 8, "tree": "best-first:4,3", "recent": 128, "budget": 1024,
}  # fmt: skip


def pair_on(device: str, dtype: torch.dtype, **options: Any) -> Engine:
    """Returns an engine with models of its own, whose texts end at ``max_new_tokens`` alone.

    Args:
        options: of :func:`triforce_tree.load`, advanced ones among them.
    """
    target, draft = (load_model(PAIR / name, torch.device(device), dtype) for name in ("target", "draft"))
    target.generation_config.eos_token_id = None
    return load(target, draft, tokenizer=load_tokenizer(PAIR / "target"), **load_arguments(options))


def inflated(device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Returns a target of 8 layers with a draft and a tokenizer; texts end at ``max_new_tokens`` alone."""
    target, draft, tokenizer = inflate_pair("2048x8x16/16x128x5632", device, dtype, "llama-68m")
    target.generation_config.eos_token_id = None
    return target, draft, tokenizer


@cache
def long_text() -> list[int]:
    """Returns the token ids of Python's documentation, more than 70,000."""
    return token_ids(load_tokenizer(PAIR / "target"), pydoc_text())
