"""The command line; each command has ``add(subparsers)`` and ``run(args)``."""
