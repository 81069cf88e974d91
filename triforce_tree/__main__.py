"""``python -m triforce_tree``: the command line."""

import sys

from triforce_tree.cli.entry import main

sys.exit(main())
