"""Mixture-of-experts layers: where their weights are, and forwards of few rows."""
