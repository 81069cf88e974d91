"""Lossless speculative decoding with hierarchical drafting, for long contexts."""

from triforce_tree.api import Engine, GenerateOutput, custom_generate, generate, load
from triforce_tree.hf_model import UnsupportedModelError
from triforce_tree.stats import LevelStats

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "GenerateOutput",
    "LevelStats",
    "UnsupportedModelError",
    "custom_generate",
    "generate",
    "load",
]
