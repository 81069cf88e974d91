"""Recurrence of linear attention and state space layers over a few tokens, from a given state."""

from triforce_tree.kernels.recurrent.recurrence import linear_recurrence

__all__ = ["linear_recurrence"]
