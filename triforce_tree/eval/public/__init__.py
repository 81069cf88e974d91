"""Public data sets of long texts: what their rows mean, where they come from, and their published metrics."""
