"""The KV backend of a batch whose prompts begin alike: what they share is stored, computed and read once."""
