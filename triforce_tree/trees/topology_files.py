"""JSON files of tree topologies: ``{"paths": [[0], [0, 0], [1]]}`` or ``{"widths": [6, 5, 4]}``.

A file with only a list holds rank paths (Medusa's form).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.files.writing import replace_file

SUFFIX = ".json"
_FORM = 'the file must hold {"paths": [[0], [0, 0], [1]]} or {"widths": [6, 5, 4]}'


def read_topology(path: str | Path) -> tuple[list[list[int]] | None, list[int] | None]:
    """Returns (rank paths, None) for a static tree or (None, widths) for a best-first tree.

    Raises:
        ValueError: there is no such file, or it holds neither.
    """
    try:
        held = read_json(Path(path))
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; {_FORM}") from error
    if isinstance(held, list):
        held = {"paths": held}
    known = held.keys() & {"paths", "widths"} if isinstance(held, dict) else set()
    if known == {"paths"} and isinstance(held["paths"], list) and all(map(_integers, held["paths"])):
        return held["paths"], None
    if known == {"widths"} and _integers(held["widths"]):
        return None, held["widths"]
    raise ValueError(_FORM)


def check_shape_file(path: str | Path) -> None:
    """Raises ValueError unless the file name ends in ``.json``, as :func:`parse_shape` requires."""
    if Path(path).suffix != SUFFIX:
        raise ValueError(f"{str(path)!r} cannot be read as a tree later; use a name that ends in {SUFFIX}")


def write_topology(
    path: str | Path, paths: Sequence[Sequence[int]] | None, widths: Sequence[int] | None = None
) -> None:
    """Writes rank paths, or widths if ``paths`` is None, in the form that :func:`read_topology` reads.

    Raises:
        OSError: the file cannot be written.
    """
    held = {"paths": [list(p) for p in paths]} if paths is not None else {"widths": list(widths or ())}
    replace_file(path, json.dumps(held) + "\n")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(r, int) and not isinstance(r, bool) for r in value)
