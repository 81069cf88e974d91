"""Sizes of common models, for memory plans."""

from dataclasses import replace

from triforce_tree.planning.memory_map import Sizes

LLAMA_2_7B = Sizes(int(13.48e9), int(0.15e9), 32, 32, 32, 128, 4096, 11008, 32000)
LLAMA_3_1_8B = Sizes(int(16.06e9), int(0.15e9), 32, 32, 8, 128, 4096, 14336, 128256)
LLAMA_2_13B = Sizes(int(26.03e9), int(0.15e9), 40, 40, 40, 128, 5120, 13824, 32000)
_LAYER_13B = 2 * (4 * 5120 * 5120 + 3 * 13824 * 5120)
STREAMED_13B = replace(LLAMA_2_13B, streamed=40 * _LAYER_13B, slots=2 * _LAYER_13B)
LONG = 122_880
