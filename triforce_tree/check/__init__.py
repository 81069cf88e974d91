"""Tests on a user's own pair that the output is the target's, and judgements about differences."""
