"""Trained heads, which draft from the target's hidden states: Medusa and EAGLE-3, in published formats."""
