"""Results files of ``triforce-tree bench`` as tables, plots, reports and comparisons."""
