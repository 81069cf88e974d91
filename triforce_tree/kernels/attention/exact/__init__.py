"""Attention of a query in one order of sums, whatever is computed with it and wherever its keys are."""
