"""Forwards of transformers causal LMs over explicit KV caches, and linear layers for few rows."""
