"""Chunks of KV that are copied from host memory into slots on the device."""

from triforce_tree.kernels.exchange.chunks import exchange_chunks, fetch_chunks, fetch_words, place_of

__all__ = ["exchange_chunks", "fetch_chunks", "fetch_words", "place_of"]
