"""What a script that checks things has found: said as it goes, and in the end as one line of JSON."""

import json
import sys
from typing import Any


class Verdicts:
    """Checks by name, with the figures they were judged by."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, passed: bool, **figures: Any) -> None:
        self.rows.append({"check": name, "passed": passed, **figures})
        print("ok    " if passed else "FAILED", name, figures, file=sys.stderr, flush=True)

    @property
    def failed(self) -> list[str]:
        return [row["check"] for row in self.rows if not row["passed"]]

    def tell(self, **more: Any) -> int:
        """Print how many there were, which of them failed, and more; the exit code."""
        print(json.dumps({"checks": len(self.rows), "failed": self.failed, **more}))
        return int(bool(self.failed))
