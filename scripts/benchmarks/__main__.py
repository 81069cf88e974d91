"""Benchmarks, and the tables of README.md and docs/ that show them.

    python -m scripts.benchmarks                          # what there is
    python -m scripts.benchmarks any_text --shapes 7b     # a benchmark; --help tells its options
    python -m scripts.benchmarks tables                   # write the tables; --check, --plots

A benchmark writes docs/results/FILE, or with --out a file elsewhere. Those that take long go on where they
ended when they are called again.
"""

import importlib
import sys

from scripts.benchmarks.registry import BENCHMARKS


def main(words: list[str]) -> int:
    if not words or words[0] in ("list", "-h", "--help"):
        print(__doc__)
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:{max(map(len, BENCHMARKS))}}  {benchmark.about}")
        return 0
    if words[0] not in BENCHMARKS:
        print(f"unknown benchmark {words[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"scripts.{BENCHMARKS[words[0]].module}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("scripts"):
            raise
        print(
            f"{words[0]} needs the package {missing.name}; install it (triton comes with torch for CUDA)",
            file=sys.stderr,
        )
        return 2
    return int(module.main(words[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
