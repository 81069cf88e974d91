"""Key-value caches: full, streaming, retrieval. One protocol, see ``base``."""

from triforce_tree.caches.base import KVCache, Rows
from triforce_tree.caches.full import FullCache
from triforce_tree.caches.retrieval import RetrievalCache
from triforce_tree.caches.streaming import StreamingCache

__all__ = ["FullCache", "KVCache", "RetrievalCache", "Rows", "StreamingCache"]
