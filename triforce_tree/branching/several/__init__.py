"""Several texts of one prompt by ``generate``: beams and samples, on a tree."""
