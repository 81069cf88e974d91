"""Chooses the next pass from estimates of acceptance and from the costs of stages."""
