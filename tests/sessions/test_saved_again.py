"""Sessions that are saved where one is already, and saves that fail."""

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file
from session_cases import NINE, PROMPT, engine, made

from triforce_tree.sessions import folders, saved
from triforce_tree.sessions.session import Session

pytestmark = pytest.mark.usefixtures("small_rings")
FULL = "I/O error: No space left on device (os error 28)"


def generated(family: str = "llama-gqa") -> Session:
    session = made(family).with_options().session(PROMPT)
    session.generate(**NINE)
    return session


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing(error: BaseException, count: int = 1) -> Callable[[dict[str, Any], Path], None]:
    """A ``save_file`` that ends with ``error`` after ``count`` files, in the middle of the next one."""
    written: list[Path] = []

    def save(parts: dict[str, Any], path: Path) -> None:
        written.append(path)
        if len(written) > count:
            Path(path).write_bytes(b"a part")
            raise error
        save_file(parts, path)

    return save


@pytest.mark.parametrize(
    "error, said",
    [
        (SafetensorError(FULL), r"cannot write a session to '.*s' \(I/O error: No space left .*; free some"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (KeyboardInterrupt(), "^$"),
    ],
    ids=["safetensors", "a full disk", "Ctrl-C"],
)
def test_a_failed_save_leaves_the_earlier_session(
    error: BaseException, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    session = generated()
    session.save(folder)
    tokens, before = list(session.tokens), contents(folder)
    session.generate([1, 2], **NINE)
    with monkeypatch.context() as patched:
        patched.setattr(saved, "save_file", failing(error))
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError
        with pytest.raises(kind, match=said):
            session.save(folder)
    assert contents(folder) == before
    assert engine().load_session(folder).tokens == tokens
    session.save(folder)
    assert engine().load_session(folder).tokens == session.tokens
    assert contents(folder).keys() == before.keys()


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = generated()
    with monkeypatch.context() as patched:
        patched.setattr(saved, "save_file", failing(SafetensorError(FULL)))
        with pytest.raises(OSError, match="No space"):
            session.save(tmp_path)
    assert not contents(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no session"):
        engine().load_session(tmp_path)
    session.save(tmp_path)
    assert engine().load_session(tmp_path).tokens == session.tokens


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    """What safetensors itself raises."""
    session = generated()
    session.save(tmp_path)
    tokens, before = list(session.tokens), contents(tmp_path)
    session.generate([1, 2], **NINE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            session.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before
    assert engine().load_session(tmp_path).tokens == tokens


def test_a_killed_save_and_files_of_another_model_are_removed(tmp_path: Path) -> None:
    """Files that are of no session stay."""
    generated("lfm2").save(tmp_path)
    assert (tmp_path / folders.STATES).is_file()
    session = generated()
    session.save(tmp_path / "expected")
    (tmp_path / "layer-00099.safetensors").touch()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "session.part").mkdir()
    (tmp_path / "session.part" / "layer-00000.safetensors").touch()
    names = [path.name for path in (tmp_path / "expected").iterdir()]
    session.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "expected", "notes.txt"])
    assert (tmp_path / "notes.txt").read_text() == "mine"
