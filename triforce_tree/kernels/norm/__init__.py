"""Norms whose bits do not depend on the number of rows."""
