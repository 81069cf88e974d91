"""Finds GGUF files and reads their headers. Nothing here imports torch or the package ``gguf``."""

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from triforce_tree.loading.model_folder import CONFIG, downloaded

SUFFIX = ".gguf"
# The header has magic bytes, a version, and the numbers of tensors and of metadata entries.
_HEADER = struct.Struct("<4sIQQ")
# GGUF's value types of fixed size, as format characters of ``struct``.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Tensors begin at multiples of this, unless the metadata give another number.
_ALIGNMENT = 32
_MOST_ENTRIES = 1 << 16
# The errors of reading a header that is cut off, or whose bytes are wrong.
_DAMAGED = (struct.error, KeyError, ValueError, IndexError)


def is_gguf(source: object) -> bool:
    """Returns whether ``source`` is a path that ends in ``.gguf``."""
    return isinstance(source, str | Path) and str(source).lower().endswith(SUFFIX)


def gguf_path(source: Any, gguf_file: str | None = None) -> Any:
    """Returns the path of a GGUF file in a folder or hub repository, from which it is downloaded.

    Args:
        source: a folder, hub id or model. Without ``gguf_file`` it is returned unchanged, unless it is a
            folder whose only model is one GGUF file; then the path of this file is returned.
        gguf_file: the name of the file.

    Raises:
        TypeError: ``gguf_file`` was given with a source that is no path.
        ValueError: ``gguf_file`` is not the name of a GGUF file.
    """
    if gguf_file is None:
        return _only_one(source)
    if not isinstance(source, str | Path):
        raise TypeError(
            f"gguf_file={gguf_file!r} names a file of the target's folder, and the target is a model; give a "
            "folder or a hub id, or leave it out"
        )
    if not is_gguf(gguf_file):
        raise ValueError(f"gguf_file={gguf_file!r} does not end in {SUFFIX}; name a GGUF file")
    if not Path(source).exists() and not str(source).startswith((".", "/", "~")):
        source = downloaded(str(source), [gguf_file])
    return Path(source) / gguf_file


def _only_one(source: Any) -> Any:
    if not isinstance(source, str | Path) or not (folder := Path(source)).is_dir():
        return source
    files = [path for path in folder.iterdir() if is_gguf(path)]
    return files[0] if len(files) == 1 and not (folder / CONFIG).exists() else source


def tensor_count(path: Path) -> int:
    """Returns the number of tensors in the header of a GGUF file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a GGUF file.
    """
    return _counts(path)[0]


def named_positions(path: Path) -> int | None:
    """Returns the most positions by the metadata of a GGUF file; None if they are missing.

    Raises:
        FileNotFoundError, ValueError: as in :func:`tensor_count`.
    """
    found = values_of(path, ("context_length", "rope.scaling.factor"))
    numbers = {name: value for name, value in found.items() if not isinstance(value, str)}
    if "context_length" not in numbers:
        return None
    return int(numbers["context_length"] * max(1.0, numbers.get("rope.scaling.factor", 1.0)))


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file.
        shape: its shape as torch has it: rows first.
        kind: GGUF's number for its type.
        offset: offset of its first byte in the file.
        bytes: number of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


def values_of(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns numbers and strings of the metadata of a GGUF file, as far as they are there.

    Args:
        names: names of values, whole or without the architecture before them.

    Raises:
        FileNotFoundError, ValueError: as in :func:`tensor_count`.
    """
    found, entries = dict[str, Any](), _counts(path)[1]
    with suppress(*_DAMAGED):
        for name, kind, content, at in _metadata(path, entries):
            own = name if name in names else name.partition(".")[2]
            if own in names and kind in _NUMBERS:
                (found[own],) = struct.unpack_from("<" + _NUMBERS[kind], content, at)
            elif own in names and kind == _STRING:
                found[own] = _string(content, at)[0].decode("utf-8", "replace")
    return found


def stored_tensors(path: Path, sizes: Mapping[Any, tuple[int, int]]) -> list[StoredTensor]:
    """Returns the tensors of a GGUF file, none of which is read.

    Args:
        sizes: elements and bytes of a block, by GGUF's number for the type.

    Raises:
        FileNotFoundError, ValueError: as in :func:`tensor_count`, or the header is damaged.
    """
    count, entries = _counts(path)
    alignment = values_of(path, ("general.alignment",)).get("general.alignment", _ALIGNMENT)
    at, found = _HEADER.size, list[StoredTensor]()
    try:
        for _, kind, content, value in _metadata(path, entries):
            at = _after(content, value, kind)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for _ in range(min(count, _MOST_ENTRIES)):
                name, at = _string(content, at)
                (dims,) = struct.unpack_from("<I", content, at)
                *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", content, at + 4)
                at += 4 + 8 * dims + 12
                elements, size = sizes[kind]
                stored = prod(shape) // elements * size
                found.append(StoredTensor(name.decode(), tuple(reversed(shape)), kind, offset, stored))
        start = -(-at // alignment) * alignment
        return [tensor._replace(offset=start + tensor.offset) for tensor in found]
    except _DAMAGED as error:
        raise ValueError(
            f"the header of {str(path)!r} is damaged ({error}); copy or download it again"
        ) from error


def _counts(path: Path) -> tuple[int, int]:
    """Returns the numbers of tensors and of metadata entries."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}; give the path of a GGUF file")
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] != b"GGUF":
        raise ValueError(f"{str(path)!r} is no GGUF file (its header is missing); copy or download it again")
    _, _, tensors, entries = _HEADER.unpack(head)
    return int(tensors), int(entries)


def _metadata(path: Path, entries: int) -> Iterator[tuple[str, int, mmap.mmap, int]]:
    """Iterates over the metadata.

    Yields:
        name, GGUF's number for the type of the value, the file, and the offset of the value in it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = _HEADER.size
        for _ in range(min(entries, _MOST_ENTRIES)):
            name, at = _string(content, at)
            (kind,) = struct.unpack_from("<I", content, at)
            yield name.decode("utf-8", "replace"), kind, content, at + 4
            at = _after(content, at + 4, kind)


def _string(content: mmap.mmap, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", content, at)
    return content[at + 8 : at + 8 + length], at + 8 + length


def _after(content: mmap.mmap, at: int, kind: int) -> int:
    """Returns the offset of the first byte after the value of type ``kind`` at offset ``at``."""
    if kind in _NUMBERS:
        return at + struct.calcsize("<" + _NUMBERS[kind])
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", content, at)[0])
    if kind != _ARRAY:
        raise ValueError(f"type {kind}")
    of, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if of in _NUMBERS:
        return at + int(count) * struct.calcsize("<" + _NUMBERS[of])
    length = struct.Struct("<Q").unpack_from
    if of == _STRING:
        for _ in range(count):
            at += 8 + length(content, at)[0]
        return at
    for _ in range(count):
        at = _after(content, at, of)
    return at
