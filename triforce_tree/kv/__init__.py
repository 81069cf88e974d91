"""KV caches: where keys and values are stored, and what the attention layers of a forward see of them."""
