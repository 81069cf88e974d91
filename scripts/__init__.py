"""This package is not installed: benchmarks, checks, and the training of the embedded pair.

Run from the repository's root, as ``python -m scripts.benchmarks``. This file makes ``scripts`` an ordinary
package, so that no installed one of that name is imported in its place.
"""
