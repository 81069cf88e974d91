"""Files of saved sessions as tests change them, with descriptions and checksums that fit the change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from triforce_tree.sessions.tensor_files import write_tensors

REMOVED = object()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def file_of(folder: Path, name: str) -> Path:
    """Returns the only file whose name begins so."""
    (path,) = folder.glob(f"{name}-*.safetensors")
    return path


def fields(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "session.json").read_bytes())
    return found


def change(folder: Path, **changed: Any) -> None:
    """Changes members of ``session.json``."""
    found = {k: v for k, v in {**fields(folder), **changed}.items() if v is not REMOVED and k != "checksum"}
    rest = json.dumps(found).encode()[1:]
    digest = xxhash.xxh3_64_hexdigest(rest).encode()
    (folder / "session.json").write_bytes(b'{"checksum": "%s", %s' % (digest, rest))


def rewrite(folder: Path, name: str, parts: Mapping[str, Tensor]) -> None:
    """Puts other tensors into a file."""
    path = file_of(folder, name)
    path.unlink()
    described = write_tensors(path, {n: part.contiguous() for n, part in parts.items()}).as_json()
    change(folder, files={**fields(folder)["files"], name: described})
