"""What drafting may lose, and trials and preparation may cost."""
