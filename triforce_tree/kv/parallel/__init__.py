"""The KV slots of one sequence split over ranks by position (context parallelism)."""
