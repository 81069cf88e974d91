"""Files that are replaced in a single step: a killed process leaves the earlier one or the new one."""

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all. What is no ordinary file, such as a pipe, is written in place.

    Args:
        path: of the file; where it is a link, the file that it leads to is replaced.
        content: text is written in UTF-8.

    Raises:
        OSError: the file cannot be written; it is then as before.
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
    """Wait until the disk holds what was written to an open file, or which files an open folder has.

    Raises:
        OSError: the disk cannot hold it.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems have no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
