"""An OpenAI-compatible server over one engine: ``triforce-tree serve``."""
