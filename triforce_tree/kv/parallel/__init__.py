"""Splits the KV slots of one sequence over ranks by position (context parallelism)."""
