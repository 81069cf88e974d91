"""A disk cache of the unpacked configurations, tokenizers and weights of GGUF files in transformers' format.

An entry is a folder in ``gguf`` in the cache folder of the user (``user_cache``), named by the digest
of the GGUF file, the versions that unpacked it, and the kind of content. Entries may be deleted at any time.
Nothing here imports torch.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.files.writing import user_cache
from triforce_tree.runtime.progress_log import LOG, logged

CONFIG, TOKENIZER = "config", "tokenizer"
# This file of every entry has the digests of its other files.
_CONTENTS = "contents.json"
_FORMAT = 1
# Bytes of disk space that must stay free after weights are written, and most bytes of a configuration or
# tokenizer.
_SPARE, _SMALL = 1 << 30, 64 << 20
# A temporary folder older than this many seconds belongs to a process that was killed.
_ABANDONED = 24 * 3600
_WARNINGS = logging.getLogger(__name__)


def kept(path: Path, kind: str) -> Path | None:
    """Returns the folder of an entry of the cache, or None if there is none. A damaged entry is removed.

    Args:
        path: the GGUF file.
        kind: :data:`CONFIG`, :data:`TOKENIZER`, or the dtype of the weights.
    """
    try:
        folder = _entry(path, kind)
        if not (folder / _CONTENTS).is_file():
            return None
    except (OSError, RuntimeError) as error:  # no rights, or no home folder
        _warn_once(path.name, None, str(error))
        return None
    with logged(f"comparing {folder} with its digests"):
        damaged = _damaged(folder)
    if damaged is None:
        return folder
    _WARNINGS.warning("%s in %s is damaged, so %s is unpacked again", damaged, folder, path.name)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def keep(path: Path, kind: str, size: int, write: Callable[[Path], object]) -> None:
    """Adds an entry to the cache, or warns if it cannot be written.

    Other processes see the complete entry or none. Entries of other versions for the same file are removed.

    Args:
        path: the GGUF file.
        kind: as for :func:`kept`.
        size: approximate bytes of the weights; 0 for a configuration or tokenizer.
        write: writes the files of the entry into an empty folder.
    """
    folder = None
    try:
        folder = _entry(path, kind)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts(folder.parent)
        free = shutil.disk_usage(folder.parent).free
        wanted = size + (_SPARE if size else _SMALL)
        if free < wanted:
            raise OSError(f"{free / 1e9:.1f} GB are free, {wanted / 1e9:.1f} GB are needed")
        part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
        try:
            with logged(f"keeping the unpacked {kind} of {path.name} in {folder}"):
                write(part)
                digests = {each.name: digest_of(each) for each in sorted(part.iterdir())}
            (part / _CONTENTS).write_text(json.dumps(digests) + "\n", encoding="utf-8")
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except Exception as error:  # third-party code, which may raise anything, writes the files
        # Another process may have added the same entry meanwhile.
        with suppress(OSError):
            if folder is not None and (folder / _CONTENTS).is_file():
                return
        _warn_once(path.name, folder and folder.parent, str(error))
        return
    _remove_others(folder)
    if size > _SPARE >> 6:
        LOG.info(
            "%s has %.1f GB, and the next run loads it from there; delete it to free them", folder, size / 1e9
        )


@cache
def _warn_once(name: str, folder: Path | None, why: str) -> None:
    _WARNINGS.warning(
        "the unpacked contents of %s cannot be kept in %s (%s), so they are unpacked in every run; set "
        "TRIFORCE_TREE_CACHE to another folder", name, folder or "the user's cache folder", why,
    )  # fmt: skip


def _entry(path: Path, kind: str) -> Path:
    file = path.resolve()
    about = file.stat()
    # Every change of a file's contents changes its ctime, so the digest can be cached under it.
    digest = _digest(file, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    versions = f"{version('transformers')}-{version('gguf')}-{_FORMAT}"
    return user_cache("gguf") / f"{file.stem}-{digest[:32]}" / versions / kind


@lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with logged(f"reading {path} for its digest"):
        return digest_of(path)


def _damaged(folder: Path) -> str | None:
    """Returns the name of a missing or changed file in an entry, or None if there is none."""
    try:
        digests = read_json(folder / _CONTENTS)
        names = {each.name for each in folder.iterdir()} - {_CONTENTS}
        if not isinstance(digests, dict) or digests.keys() != names:
            return _CONTENTS
        return next((name for name, digest in digests.items() if digest_of(folder / name) != digest), None)
    except (OSError, ValueError):
        return _CONTENTS


def _remove_others(folder: Path) -> None:
    for versions in folder.parent.parent.iterdir():
        if versions != folder.parent:
            shutil.rmtree(versions, ignore_errors=True)


def _remove_parts(folder: Path) -> None:
    """Removes temporary folders of processes that were killed."""
    for part in folder.glob(".part-*"):
        if time.time() - part.stat().st_mtime > _ABANDONED:
            shutil.rmtree(part, ignore_errors=True)


# Bytes of a part of a file that a thread reads, and of one read.
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
