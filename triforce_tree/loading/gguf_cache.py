"""Tokenizers and weights of GGUF files in files of transformers' form, made once for a file's contents.

They are in ``gguf`` in the user's cache folder (``user_folders.user_cache``), by the digest of the GGUF file,
the versions that unpacked it and the dtype; any of them may be deleted at any time. Nothing here imports
torch.
"""

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from triforce_tree.runtime.files.digests import digest_of
from triforce_tree.runtime.files.json_files import read_json
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.runtime.telling import LOG, told

CONFIG, TOKENIZER = "config", "tokenizer"
# In every entry: the digests of its other files.
_CONTENTS = "contents.json"
_FORMAT = 1
# Disk space that is left to others beside weights, and what a configuration or a tokenizer may take.
_SPARE, _SMALL = 1 << 30, 64 << 20
# Seconds after which nobody writes into a folder any more.
_ABANDONED = 24 * 3600
_WARNINGS = logging.getLogger(__name__)


def kept(path: Path, kind: str) -> Path | None:
    """The folder with what was kept of a GGUF file, None where there is none; a damaged one is removed.

    Args:
        kind: :data:`CONFIG`, :data:`TOKENIZER`, or the weights' dtype.
    """
    try:
        folder = _entry(path, kind)
        if not (folder / _CONTENTS).is_file():
            return None
    except (OSError, RuntimeError) as error:  # no rights, or no home folder
        _warn_once(path.name, None, str(error))
        return None
    with told(f"comparing {folder} with its digests"):
        damaged = _damaged(folder)
    if damaged is None:
        return folder
    _WARNINGS.warning("%s in %s is damaged, so %s is unpacked again", damaged, folder, path.name)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def keep(path: Path, kind: str, size: int, write: Callable[[Path], object]) -> Path | None:
    """Keep something of a GGUF file; the folder, or None with a warning where there is no room for it.

    Other processes see all of it or nothing. What other versions have kept of the same file is removed.

    Args:
        kind: as for :func:`kept`.
        size: in bytes, about.
        write: puts the files into an empty folder.
    """
    folder = None
    try:
        folder = _entry(path, kind)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts(folder.parent)
        free = shutil.disk_usage(folder.parent).free
        wanted = size + (_SPARE if size else _SMALL)
        if free < wanted:
            raise OSError(f"{free / 1e9:.1f} GB are free, {wanted / 1e9:.1f} GB are wanted")
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
        try:
            with told(f"keeping the unpacked {kind} of {path.name} in {folder}"):
                write(made)
                digests = {each.name: digest_of(each) for each in sorted(made.iterdir())}
            (made / _CONTENTS).write_text(json.dumps(digests) + "\n", encoding="utf-8")
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except Exception as error:  # third-party code writes the files
        # Another process may have kept the same meanwhile.
        with suppress(OSError):
            if folder is not None and (folder / _CONTENTS).is_file():
                return folder
        _warn_once(path.name, folder and folder.parent, str(error))
        return None
    _remove_others(folder)
    if size > _SPARE >> 6:
        LOG.info(
            "%s has %.1f GB, and the next run loads it from there; delete it to free them", folder, size / 1e9
        )
    return folder


@cache
def _warn_once(name: str, folder: Path | None, why: str) -> None:
    _WARNINGS.warning(
        "what is unpacked of %s cannot be kept in %s (%s), so it is unpacked in every run; "
        "TRIFORCE_TREE_CACHE names another folder", name, folder or "the user's cache folder", why,
    )  # fmt: skip


def _entry(path: Path, kind: str) -> Path:
    file = path.resolve()
    about = file.stat()
    # Whatever changes a file's contents changes its ctime.
    digest = _digest(file, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    versions = f"{version('transformers')}-{version('gguf')}-{_FORMAT}"
    return user_cache("gguf") / f"{file.stem}-{digest[:32]}" / versions / kind


@lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    with told(f"reading {path} for its digest"):
        return digest_of(path)


def _damaged(folder: Path) -> str | None:
    """The name of a file that is missing or changed; None where there is none."""
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
    """Remove what processes that were killed have left."""
    for part in folder.glob(".part-*"):
        if time.time() - part.stat().st_mtime > _ABANDONED:
            shutil.rmtree(part, ignore_errors=True)
