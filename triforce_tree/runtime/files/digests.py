"""Computes digests of large files with several threads."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PART, _READ = 32 << 20, 1 << 20


def digest_of(path: Path) -> str:
    """Returns a digest of a file: the SHA-256 of the SHA-256 digests of its parts of 32 MiB.

    Threads read the parts in parallel.

    Raises:
        OSError: the file cannot be read.
    """
    starts = range(0, path.stat().st_size, _PART)
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1, len(starts)))) as threads:
        parts = threads.map(lambda start: _part(path, start), starts)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _part(path: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), _PART
    with path.open("rb") as file:
        file.seek(start)
        while left and (block := file.read(min(_READ, left))):
            digest.update(block)
            left -= len(block)
    return digest.digest()
