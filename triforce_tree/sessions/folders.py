"""The folder of a saved session: the names of its files, and how new ones take the place of old ones."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError

FILE, TOKENS, STATES = "session.json", "tokens.safetensors", "states.safetensors"
_LAYER = "layer-{}.safetensors"
_PART = "session.part"


def layer_file(folder: Path, layer: int) -> Path:
    return folder / _LAYER.format(f"{layer:05d}")


def check_free(folder: Path) -> None:
    """Raise FileExistsError where ``folder`` is a file, or holds files but none of a session."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file, and a session is a folder; give another path")
    there = [path.name for path in folder.iterdir()]
    if there and not any(map(_is_ours, there)):
        raise FileExistsError(f"{str(folder)!r} holds files of something else; give a new or an empty folder")


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A context with an empty folder inside ``folder``, whose files then replace those of ``folder``.

    Until all are written ``folder`` is as before, and stays so after an error; its disk then holds both. Only
    the moves at the end are no single step: where a process ends among them, there is no session any more.

    Raises:
        OSError: the files cannot be written.
    """
    new = folder / _PART
    # An earlier process may have been killed.
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        _swap(new, folder)
    except SafetensorError as error:
        raise OSError(
            f"cannot write a session to {str(folder)!r} ({error}); free some space, or give another folder"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _swap(new: Path, folder: Path) -> None:
    """Move the files of ``new`` to ``folder``, in place of all of a session that are there."""
    # First removed, last moved: a folder with it is complete.
    (folder / FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path != new and _is_ours(path.name):
            path.unlink()
    for path in sorted(new.iterdir(), key=lambda path: path.name == FILE):
        os.replace(path, folder / path.name)


def _is_ours(name: str) -> bool:
    """Whether a session's folder has a file or folder of this name."""
    return name in (FILE, TOKENS, STATES, _PART) or fnmatch(name, _LAYER.format("*"))
