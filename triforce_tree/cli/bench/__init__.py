"""``triforce-tree bench``: measurements, each a module with ``run(args)``; ``arguments`` describes them."""
