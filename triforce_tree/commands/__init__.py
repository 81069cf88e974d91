"""The commands of the command line: each has ``add(subparsers)`` and ``run(args)``."""
