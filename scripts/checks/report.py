"""Defines what every check shares: command line, verdicts, and the line of JSON at its end."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns the command line of a check; the first line of its docstring says what it is."""
    return argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


class Report:
    """Checks by name, with the figures that they were judged by."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, passed: bool, **figures: Any) -> None:
        self.rows.append({"check": name, "passed": passed, **figures})
        print("ok    " if passed else "FAILED", name, figures or "", file=sys.stderr, flush=True)

    def attempt(self, name: str, check: Callable[[], dict[str, Any] | None]) -> None:
        """A check that fails by raising; it may return figures, with ``passed`` False where it failed."""
        try:
            self.add(name, **({"passed": True} | (check() or {})))
        except Exception as error:
            self.add(name, False, error=(str(error) or repr(error))[:400])

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if not row["passed"]]

    def finish(self, **more: Any) -> int:
        """Prints how many there were, which of them failed, and more; the exit code."""
        last_line({"checks": len(self.rows), "failed": self.failed, **more})
        return int(bool(self.failed))


def last_line(result: Any) -> None:
    print(json.dumps(result))
