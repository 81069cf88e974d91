"""Checks that need a GPU, or minutes; they share their cases with the tests."""
