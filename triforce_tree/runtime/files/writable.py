"""Checks before a long run that its results can be written. Nothing here imports torch."""

import importlib.util
import shutil
from pathlib import Path

# Results are small, but with less free disk space than this a write may fail after hours of work.
LEAST_FREE_BYTES = 8 * 2**20
_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".eps")


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


def check_picture(option: str, path: str | Path) -> None:
    """Checks that a picture can be written.

    Args:
        option: the name of the option for the message.

    Raises:
        ValueError: the suffix is no image format of matplotlib, or matplotlib is not installed.
        OSError: as in :func:`check_writable`.
    """
    if Path(path).suffix.lower() not in _PICTURES:
        raise ValueError(f"{str(path)!r} names no image format; use a suffix of {', '.join(_PICTURES)}")
    check_writable(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib; pip install matplotlib, or leave {option} out")
