"""Writes files of the user: the cache folder, replacement in a single step, checks before a long run.

A killed process leaves either the old file or the new one. Nothing here imports torch.
"""

import errno
import importlib.util
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

# Results are small, but with less free disk space than this a write may fail after hours of work.
LEAST_FREE_BYTES = 8 * 2**20
_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps")


def user_cache(name: str) -> Path:
    """Returns the path of ``name`` in the user's cache folder, which need not exist.

    The cache folder is ``TRIFORCE_TREE_CACHE`` if it is set, else ``triforce-tree`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``.

    Args:
        name: a file or folder, such as "kernels", "gguf" or "stage_costs.json".

    Raises:
        RuntimeError: neither variable is set, and the user has no home folder.
    """
    if chosen := os.environ.get("TRIFORCE_TREE_CACHE"):
        return Path(chosen) / name
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triforce-tree" / name


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Writes a file completely or not at all. A special file, such as a pipe, is written directly.

    Args:
        path: the path of the file; if it is a link, the file that it leads to is replaced.
        content: bytes, or text to be written in UTF-8.

    Raises:
        OSError: the file cannot be written; it is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            flush(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def flush(descriptor: int) -> None:
    """Waits until the contents of an open file, or the list of files of an open folder, are on the disk.

    Raises:
        OSError: the data cannot be written to the disk.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems do not support fsync.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def check_writable(path: str | Path) -> Path:
    """Checks that a results file can be written.

    Raises:
        OSError: the folder is missing, the file cannot be written, or the disk is full.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{str(path)!r}: its folder is missing; create it first")
    if path.exists() and not path.is_file():
        raise OSError(f"{str(path)!r} is not an ordinary file; give another path for the results")
    free = shutil.disk_usage(path.parent).free
    if free < LEAST_FREE_BYTES:
        raise OSError(
            f"{free / 2**20:.1f} MB are free where {str(path)!r} would be written, at least "
            f"{LEAST_FREE_BYTES / 2**20:.0f} MB are needed; free some space or give another path"
        )
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise OSError(f"{str(path)!r} cannot be written ({error.strerror}); give another path") from error
    if not existed:
        path.unlink()
    return path


def check_picture(path: str | Path) -> None:
    """Checks that the picture of the option ``--plot`` can be written.

    Raises:
        ValueError: the suffix is no image format of matplotlib, or matplotlib is not installed.
        OSError: as in :func:`check_writable`.
    """
    if Path(path).suffix.lower() not in _PICTURES:
        raise ValueError(f"{str(path)!r} names no image format; use a suffix of {', '.join(_PICTURES)}")
    check_writable(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install matplotlib, or leave --plot out")
