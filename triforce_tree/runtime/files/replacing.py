"""Replaces files in a single step, so that a killed process leaves either the old file or the new one."""

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


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
