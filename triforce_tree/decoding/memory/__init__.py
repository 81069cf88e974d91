"""Plans the memory of a generation and reduces the plan when memory runs out."""
