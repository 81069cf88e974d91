"""The pages of docs/guides, run as they are written."""

import re

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block of a Markdown page: its language, and what is in it."""
