"""The choice of passes: from estimates of acceptance and from the costs of stages to the next pass."""
