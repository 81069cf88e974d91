"""Checks that need a GPU, or minutes; they share their cases with the tests."""

import sys
from pathlib import Path

_SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path += [str(_SUPPORT / folder) for folder in ("distributions", "kernels", "models")]
