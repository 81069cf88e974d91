"""A tiny pair that has room for the embedded one, and settings that fit short prompts: for smoke runs."""

from typing import Any

SHAPES = {
    "llama-2-7b": "384x6x3/3x128x1152",
    "llama-3.1-8b": "768x7x6/3x128x1152",
    "llama-2-13b": "512x7x4/4x128x1152",
}
DRAFT_SHAPE = "256x2x4/4x64x512"
OPTIONS: dict[str, Any] = {
    "gamma": 6,
    "tree": "best-first:3,2",
    "budget": 128,
    "recent": 32,
    "window": 64,
}
