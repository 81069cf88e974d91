"""A transformers causal LM as forwards over explicit KV caches, and the linear layers made for few rows."""
