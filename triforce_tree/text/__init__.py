"""Converts new tokens to text one by one, and finds stop strings in the text."""
