"""The command line: ``arguments`` describes the commands, and each has a module with ``run(args)``."""
