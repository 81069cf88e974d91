"""Files of tensors in the format of safetensors, with checksums computed while they are written and read."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from triforce_tree.runtime.files.writing import flush

Kind = tuple[tuple[int, ...], torch.dtype]
"""The shape of a tensor, and its dtype."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def checksum(data: bytes | memoryview) -> str:
    """Returns the hexadecimal digits of xxh3 with 64 bits, which takes less time than any disk."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Description:
    """A description of a file: its tensors in their order, and the checksum of all of its bytes."""

    kinds: Mapping[str, Kind]
    checksum: str

    @property
    def head(self) -> bytes:
        """Returns the bytes of the file that precede the tensors."""
        entries, end = {}, 0
        for name, (shape, dtype) in self.kinds.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Returns the number of bytes of the file."""
        return len(self.head) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.kinds.values())

    def as_json(self) -> dict[str, Any]:
        kinds = {name: [_NAMES[dtype], *shape] for name, (shape, dtype) in self.kinds.items()}
        return {"checksum": self.checksum, "tensors": kinds}

    @classmethod
    def from_json(cls, value: Any) -> "Description":
        """Returns the description of which :meth:`as_json` returned ``value``.

        Raises:
            ValueError: ``value`` is something else.
        """
        try:
            tensors = value["tensors"].items()
            kinds = {str(name): (tuple(shape), _DTYPES[dtype]) for name, (dtype, *shape) in tensors}
            found = cls(kinds, value["checksum"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError("it describes a file in another way") from error
        if not all(type(size) is int and size >= 0 for shape, _ in kinds.values() for size in shape):
            raise ValueError("a tensor has a size that is no number")
        return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Description:
    """Writes a new file, and waits until the disk holds it.

    Args:
        path: the path of the new file; no such file may exist.
        tensors: contiguous ones in host memory, by name.

    Raises:
        OSError: it cannot be written.
    """
    kinds = {name: (tuple(part.shape), part.dtype) for name, part in tensors.items()}
    found = xxhash.xxh3_64()
    with path.open("xb", buffering=0) as file:
        head = memoryview(Description(kinds, "").head)
        for rest in (head, *(_bytes_of(part.flatten().view(torch.uint8)) for part in tensors.values())):
            found.update(rest)
            while rest:
                # A call writes at most 2 GiB.
                rest = rest[file.write(rest) :]
        flush(file.fileno())
    return Description(kinds, found.hexdigest())


def check_size(file: BinaryIO, described: Description) -> None:
    """Raises ValueError if the size of an open file differs from its description."""
    if (size := os.fstat(file.fileno()).st_size) != described.size:
        raise ValueError(f"it has {size:,} bytes and not {described.size:,}")


def read_tensors(file: BinaryIO, described: Description, buffer: Tensor | None = None) -> dict[str, Tensor]:
    """Returns the tensors in an open file, in host memory.

    Args:
        buffer: uint8 ``[n]`` of at least as many bytes as the file has, which the tensors then lie in.

    Raises:
        ValueError: a bit of it differs from what was written.
        OSError: it cannot be read.
    """
    check_size(file, described)
    data = (
        torch.empty(described.size, dtype=torch.uint8, device="cpu")
        if buffer is None
        else buffer[: described.size]
    )
    whole = rest = _bytes_of(data)
    while rest and (count := file.readinto(rest)):  # type: ignore[attr-defined]
        rest = rest[count:]
    if rest or checksum(whole) != described.checksum:
        raise ValueError("its contents are not those that were written, by their checksum")
    found, start = {}, len(described.head)
    for name, (shape, dtype) in described.kinds.items():
        stop = start + math.prod(shape) * dtype.itemsize
        # A tensor of larger elements may follow one of an odd number of bytes.
        part = data[start:stop].clone() if start % dtype.itemsize else data[start:stop]
        found[name] = part.view(dtype).view(shape)
        start = stop
    return found


def _bytes_of(data: Tensor) -> memoryview:
    """Returns the memory of a uint8 tensor ``[n]``."""
    return memoryview(data.numpy())  # type: ignore[arg-type]
