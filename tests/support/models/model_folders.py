"""Changes to a model folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]


def settings(**changes: Any) -> Change:
    """Other values in config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change
