"""The process of one engine: reads requests as JSON lines, and writes an answer for each.

    python -m scripts.benchmarks.peers.child ENGINE

The first line is a ``Load``, each further one a ``Request``. An answer is an object, with ``error`` where it
failed. What the engine's libraries print goes to standard error.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from scripts.benchmarks.peers.protocol import Engine, Load, Request, engine


def versions(own: Engine) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in own.packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def answered(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what the work returns, or why it failed."""
    try:
        return work()
    except ModuleNotFoundError as missing:
        return {"error": f"the package {missing.name} is not installed for {sys.executable}"}
    except Exception as error:  # the engine is another project's, and may raise anything
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def main(name: str) -> int:
    # Libraries print to standard output, some of them from C.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        own = engine(name)

        def load(words: dict[str, Any]) -> dict[str, Any]:
            start = time.perf_counter()
            own.load(Load(**words))
            return {"load_seconds": time.perf_counter() - start, "versions": versions(own)}

        def generate(words: dict[str, Any]) -> dict[str, Any]:
            return asdict(own.generate(Request(**words)))

        work = load
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(answered(lambda words=words, work=work: work(words))), file=out, flush=True)
            work = generate
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
