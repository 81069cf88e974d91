"""What to compare with: level 1 without a draft, the target on a window, retrieval policies of others."""
