"""Copies of KV chunks and of experts from host memory into slots on the device."""

from triforce_tree.kernels.exchange.chunks import exchange_chunks, fetch_chunks, fetch_words, place_of
from triforce_tree.kernels.exchange.experts import choose_experts, fetch_experts

__all__ = ["choose_experts", "exchange_chunks", "fetch_chunks", "fetch_experts", "fetch_words", "place_of"]
