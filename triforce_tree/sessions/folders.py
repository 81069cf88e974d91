"""The folder of a saved session, in which one small file names all others and is replaced in a single step.

    session.json                      what is no tensor, and the description of each file of tensors
    tokens-3f2a9c1e.safetensors       int64 [L]
    layer-00000-3f2a9c1e.safetensors  k, v [H_kv, n, D] of the last n of L - 1 tokens; in 8 bits also scales
    states-3f2a9c1e.safetensors       of recurrent layers, if there are any

Each save gives its files eight digits of its own. ``session.json`` takes the place of the earlier one when
the disk holds all of them, and only then the earlier files are removed: whenever a process ends, the folder
holds the earlier session or the new one. ``session.json`` begins with a checksum of all that follows it.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from triforce_tree.requests.chat import chats_of
from triforce_tree.runtime.files.json_files import MOST_BYTES, parse_json
from triforce_tree.runtime.files.writing import flush
from triforce_tree.sessions.tensor_files import (
    Description,
    Kind,
    check_size,
    checksum,
    read_tensors,
    write_tensors,
)

FILE = "session.json"
TOKENS, STATES = "tokens", "states"
"""Names of files, without their digits."""
FORMAT = 1
_NAME = re.compile(r"tokens|states|layer-\d{5,}")
_SAVE = re.compile(r"[0-9a-f]{8}")
_OURS = re.compile(rf"({_NAME.pattern})-{_SAVE.pattern}\.safetensors|session-{_SAVE.pattern}\.json")
_BEGIN = b'{"checksum": "'
_HEAD = re.compile(re.escape(_BEGIN) + rb'([0-9a-f]{16})", ')


def layer_name(layer: int) -> str:
    return f"layer-{layer:05d}"


class NewFiles:
    """The files of one save. They become a session when :meth:`finish` is called."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        self.folder, self.save = folder, secrets.token_hex(4)
        self._descriptor, self._described = descriptor, dict[str, Description]()

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a file of contiguous tensors in host memory."""
        self._described[name] = write_tensors(_path(self.folder, name, self.save), tensors)

    def finish(self, fields: Mapping[str, Any]) -> None:
        """Writes a ``session.json`` that names these files and has ``fields``."""
        files = {name: described.as_json() for name, described in self._described.items()}
        text = json.dumps({"format": FORMAT, **fields, "save": self.save, "files": files})
        rest = text.encode()[1:]
        new = self.folder / f"session-{self.save}.json"
        with new.open("xb") as file:
            file.write(b'%s%s", %s' % (_BEGIN, checksum(rest).encode(), rest))
            file.flush()
            flush(file.fileno())
        self._flush_names()
        new.replace(self.folder / FILE)
        self._flush_names()

    def _flush_names(self) -> None:
        if self._descriptor is not None:
            flush(self._descriptor)


@contextmanager
def saving(folder: Path) -> Iterator[NewFiles]:
    """Returns a context in which a session is written. An existing session in the folder stays until the new
    one is finished.

    Raises:
        OSError: the folder has other files, another process saves to it, or it cannot be written. The folder
            then still has the earlier session.
    """
    try:
        _check_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as descriptor:
            # Files of a process that was killed use disk space that the new files may need.
            _clean(folder)
            try:
                yield NewFiles(folder, descriptor)
            finally:
                _clean(folder)
    except (FileExistsError, BlockingIOError):
        raise
    except OSError as error:
        told = OSError(
            f"cannot write a session to {str(folder)!r} ({error.strerror or error}); free some space, or "
            "give another folder"
        )
        told.errno = error.errno
        raise told from error


class SavedFiles:
    """The open files of a saved session, which another process may replace meanwhile.

    Args:
        folder: the folder of the session.
        fields: the contents of ``session.json``.
        described: the descriptions of the other files, by name.
        files: these files, open.
    """

    def __init__(
        self,
        folder: Path,
        fields: dict[str, Any],
        described: Mapping[str, Description],
        files: Mapping[str, BinaryIO],
    ) -> None:
        self.folder, self.fields = folder, fields
        self._described, self._files = described, files

    @property
    def names(self) -> set[str]:
        return set(self._described)

    def path(self, name: str) -> Path:
        return _path(self.folder, name, self.fields["save"])

    def kinds(self, name: str) -> Mapping[str, Kind]:
        """Returns the shapes and dtypes of a file's tensors by name.

        Raises:
            ValueError: the size of the file is not that of its tensors.
        """
        try:
            check_size(self._files[name], self._described[name])
        except ValueError as error:
            raise damaged(self.path(name), error) from error
        return self._described[name].kinds

    def size(self, name: str) -> int:
        """Returns the number of bytes of a file."""
        return self._described[name].size

    def read(self, name: str, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the tensors of a file, in ``buffer`` if it is given: uint8 of at least :meth:`size` bytes.

        Raises:
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        try:
            return read_tensors(self._files[name], self._described[name], buffer)
        except ValueError as error:
            raise damaged(self.path(name), error) from error


@contextmanager
def opened(folder: Path) -> Iterator[SavedFiles]:
    """Returns a context with the files of a saved session.

    Raises:
        ValueError: ``session.json`` is damaged, or of another version.
        OSError: a file is missing or cannot be read.
    """
    held = _held(folder)
    while True:
        fields, described = _parsed(folder / FILE, held)
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            try:
                for name in described:
                    path = _path(folder, name, fields["save"])
                    files[name] = stack.enter_context(path.open("rb", buffering=0))
            except FileNotFoundError as error:
                before, held = held, _held(folder)
                if held == before:
                    raise FileNotFoundError(f"{path} is missing; save the session again") from error
                continue  # another process has saved meanwhile
            yield SavedFiles(folder, fields, described, files)
            return


def _path(folder: Path, name: str, save: str) -> Path:
    return folder / f"{name}-{save}.safetensors"


def _held(folder: Path) -> bytes:
    """Returns the bytes of ``session.json``."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            held = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{folder} holds no session, as {FILE} is missing; name a saved one"
        ) from error
    if len(held) > MOST_BYTES:
        raise damaged(path, f"at most {MOST_BYTES:,} bytes are read")
    return held


def _parsed(path: Path, held: bytes) -> tuple[dict[str, Any], dict[str, Description]]:
    """Returns the contents of ``session.json``, and the descriptions in it.

    Raises:
        ValueError: the file is damaged, or of another version.
    """
    head = _HEAD.match(held)
    whole = head is not None and checksum(held[head.end() :]).encode() == head[1]
    try:
        fields = parse_json(held)
    except ValueError as error:
        raise damaged(path, error) from error
    version = fields.get("format") if isinstance(fields, dict) else None
    if whole and version != FORMAT:
        raise ValueError(
            f"the session in {path.parent} was saved in format {version}, and this version reads {FORMAT}; "
            "prefill its text anew"
        )
    if not whole:
        raise damaged(path, "its contents are not those that were written, by their checksum")
    try:
        if not _SAVE.fullmatch(fields["save"]) or not all(map(_NAME.fullmatch, fields["files"])):
            raise ValueError("it names files that no session has")
        return fields, {name: Description.from_json(value) for name, value in fields["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from error


def _check_free(folder: Path) -> None:
    """Raises FileExistsError if ``folder`` is a file, or has files but no session."""
    if folder.is_symlink() and not folder.exists():
        raise FileExistsError(f"{str(folder)!r} is a link to what does not exist; give another path")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file, and a session is a folder; give another path")
    names = [path.name for path in folder.iterdir()]
    if names and not any(map(_OURS.fullmatch, names)) and not _begins(folder / FILE):
        raise FileExistsError(f"{str(folder)!r} holds files of something else; give a new or an empty folder")


def _begins(path: Path) -> bool:
    """Returns whether a file begins like the ``session.json`` of a session."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


@contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """Returns a context in which no other process saves to ``folder``. Yields the folder's descriptor; None
    on Windows.

    Raises:
        BlockingIOError: another process is saving to it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another process saves a session to {str(folder)!r} now; save again when it has ended, or "
                "give another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield descriptor
    finally:
        os.close(descriptor)


def _clean(folder: Path) -> None:
    """Removes files of saves that ``session.json`` does not name. If it cannot be read, no files are
    removed.
    """
    try:
        fields, described = _parsed(folder / FILE, _held(folder))
        kept = {_path(folder, name, fields["save"]).name for name in described}
    except FileNotFoundError:
        kept = set()
    except (ValueError, OSError):
        return
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            with suppress(OSError):
                path.unlink()


def check_fields(path: Path, found: Mapping[str, Any], tokens: int) -> None:
    """Raises ValueError if the fields of a ``session.json`` are impossible for a session of ``tokens``."""
    chunk, whole = (_number(path, name, found.get(name)) for name in ("chunk", "whole"))
    if not chunk or whole >= tokens or whole % chunk:
        raise damaged(path, f"chunk={chunk} and whole={whole} are not of a session of {tokens} tokens")
    messages, turns = found.get("messages", "missing"), found.get("turns")
    if messages is not None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise damaged(path, "messages is no list of messages")
        try:
            chats_of(messages)
        except ValueError as error:
            raise damaged(path, error) from error
    count = len(messages or ())
    if _number(path, "begun", found.get("begun")) > count:
        raise damaged(path, f"begun={found['begun']}, and there are {count} messages")
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise damaged(path, "turns is no list of pairs")
    for turn in turns:
        _, messages_then = (_number(path, "turns", number) for number in turn)
        if messages_then > count:
            raise damaged(path, f"turns holds {turn}, and there are {count} messages")


def _number(path: Path, name: str, value: Any) -> int:
    """Returns a field's value if it is a number, or raises ValueError."""
    if type(value) is not int or value < 0:
        raise damaged(path, f"{name}={value!r} is no number of tokens or messages")
    return value


def damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}); save the session again")
