"""Sessions that are saved where one is already, and saves that fail or are killed."""

import errno
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.session_cases import NINE, PROMPT, engine, made
from tests.support.models.session_files import contents
from triforce_tree.sessions.session import Session

pytestmark = pytest.mark.usefixtures("small_rings")
# Calls of the operating system that change files, as Python names them.
CALLS = {
    "open",
    "write",
    "close",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "fsync",
    "flock",
    "truncate",
}


def generated(family: str = "llama-gqa") -> Session:
    session = made(family).with_options().session(PROMPT)
    session.generate(**NINE)
    return session


@contextmanager
def at_call(number: int, action: Callable[[], None], calls: Set[str] = CALLS) -> Iterator[None]:
    """A context in which ``action`` is called before the call of this number."""
    left = [number]

    def profile(frame: object, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in calls:
            left[0] -= 1
            if not left[0]:
                action()

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def killed_save(session: Session, folder: Path, number: int) -> bool:
    """Saves in a process that is killed before one of its calls; whether it lived."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            with at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                session.save(folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return not os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_save_that_is_killed_at_any_call(tmp_path: Path) -> None:
    """The earlier or the new session is there, and the next save removes what was left."""
    session = generated()
    session.save(tmp_path / "earlier")
    earlier = list(session.tokens)
    session.generate([1, 2], **NINE)
    expected = len(contents(tmp_path / "earlier"))
    own, seen = engine(), []
    for number in range(1, 1000):
        folder = Path(shutil.copytree(tmp_path / "earlier", tmp_path / str(number)))
        lived = killed_save(session, folder, number)
        found = own.load_session(folder)
        assert found.tokens in (earlier, session.tokens)
        seen.append(found.tokens == session.tokens)
        if lived:
            break
        session.save(folder)
        assert own.load_session(folder).tokens == session.tokens
        assert len(contents(folder)) == expected
    # Each further call of an ordinary save was reached, and the new session stays once it is there.
    assert seen == sorted(seen)
    assert set(seen) == {False, True}
    assert len(seen) > 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_first_save_that_is_killed_at_any_call(tmp_path: Path) -> None:
    """There is none or the whole session, and the next save succeeds."""
    session, own = generated(), engine()
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        lived = killed_save(session, folder, number)
        if (folder / "session.json").exists():
            assert own.load_session(folder).tokens == session.tokens
        if lived:
            break
        session.save(folder)
        assert own.load_session(folder).tokens == session.tokens
    assert number > 20


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_at_any_call(error: BaseException, tmp_path: Path) -> None:
    session, own = generated(), engine()
    folder = tmp_path / "s"
    session.save(folder)
    earlier = list(session.tokens)
    session.generate([1, 2], **NINE)
    expected = len(contents(folder))

    reached: list[int] = []

    def fail() -> None:
        sys.setprofile(None)
        reached.append(number)
        raise error

    for number in range(1, 1000):
        told = ""
        try:
            # A file whose close is called is closed.
            with at_call(number, fail, CALLS - {"close"}):
                session.save(folder)
        except (OSError, KeyboardInterrupt) as raised:
            told = str(raised)
        # What is left of earlier files is no error.
        if told:
            assert told == (
                f"cannot write a session to '{folder}' (No space left on device); free some space, or give "
                "another folder"
            )
        assert own.load_session(folder).tokens in (earlier, session.tokens)
        if number not in reached:
            break
    assert own.load_session(folder).tokens == session.tokens
    assert len(contents(folder)) == expected
    assert len(reached) > 20


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    """The operating system itself raises the error."""
    session = generated()
    session.save(tmp_path)
    tokens, before = list(session.tokens), contents(tmp_path)
    session.generate([1, 2], **NINE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write a session to '.*' \(File too large\); free some"):
            session.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before
    assert engine().load_session(tmp_path).tokens == tokens


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(
        OSError, match=r"cannot write a session to '/proc/s' \(.*\); free some space, or give"
    ):
        generated().save("/proc/s")


def test_over_the_folder_that_it_was_loaded_from(tmp_path: Path) -> None:
    generated().save(tmp_path)
    loaded = engine().load_session(tmp_path)
    loaded.generate([1, 2], **NINE)
    loaded.save(tmp_path)
    again = engine().load_session(tmp_path)
    assert again.tokens == loaded.tokens
    assert again.generate([3], **NINE).sequences.tolist() == loaded.generate([3], **NINE).sequences.tolist()


def test_files_of_another_model_are_removed_and_others_stay(tmp_path: Path) -> None:
    generated("lfm2").save(tmp_path)
    session = generated()
    session.save(tmp_path / "expected")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "layer-00099.safetensors").write_text("mine too")
    session.save(tmp_path)
    mine = {"expected", "notes.txt", "layer-00099.safetensors"}
    assert len(list(tmp_path.iterdir())) == len(mine) + len(contents(tmp_path / "expected"))
    assert mine < {path.name for path in tmp_path.iterdir()}


def test_a_damaged_session_is_replaced(tmp_path: Path) -> None:
    session = generated()
    session.save(tmp_path)
    expected = len(contents(tmp_path))
    (tmp_path / "session.json").write_text("{")
    session.save(tmp_path)
    assert engine().load_session(tmp_path).tokens == session.tokens
    assert len(contents(tmp_path)) == expected


@pytest.mark.parametrize("name", ["session.json", "config.json", "tokens.safetensors"])
def test_folders_of_something_else_stay(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(
        FileExistsError, match=r"holds files of something else; give a new or an empty folder$"
    ):
        generated().save(tmp_path)
    assert contents(tmp_path) == {name: b'{"mine": 1}'}


def test_links(tmp_path: Path) -> None:
    """A link to a folder is followed; files that links in the folder lead to stay as they are."""
    session = generated()
    session.save(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "s").iterdir():
        (tmp_path / "copy" / path.name).symlink_to(path)
    before, tokens = contents(tmp_path / "s"), list(session.tokens)
    assert engine().load_session(tmp_path / "copy").tokens == tokens
    session.generate([1, 2], **NINE)
    session.save(tmp_path / "copy")
    assert engine().load_session(tmp_path / "copy").tokens == session.tokens
    assert contents(tmp_path / "s") == before
    session.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert engine().load_session(tmp_path / "s").tokens == session.tokens
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(FileExistsError, match="nowhere' is a link to what does not exist; give another path"):
        session.save(tmp_path / "nowhere")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_save_to_one_folder(tmp_path: Path) -> None:
    """Each save succeeds, or is refused in a sentence; what is loaded meanwhile is one of the sessions."""
    session, folder = generated(), tmp_path / "s"
    session.save(folder)
    children = []
    for child in range(2):
        children.append(os.fork())
        if not children[-1]:
            try:
                torch.set_num_threads(1)
                session.tokens[0] = 1 + child
                for _ in range(20):
                    try:
                        session.save(folder)
                    except BlockingIOError as error:
                        if "another process saves a session to" not in str(error):
                            os._exit(2)
            except BaseException:
                os._exit(1)
            os._exit(0)
    own, found = engine(), set[int]()
    running = set(children)
    while running:
        found.add(own.load_session(folder).tokens[0])
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            assert not status
            running -= {ended}
    assert found <= {PROMPT[0], 1, 2}


def test_messages_that_cannot_be_read_again(tmp_path: Path) -> None:
    """They are refused before anything is written."""
    deep: Any = []
    for _ in range(40):
        deep = [deep]
    for wrong in (object(), deep):
        session = engine().session([{"role": "user", "content": "Who", "more": wrong}])
        session.generate(**NINE)
        with pytest.raises(ValueError, match=r"the messages cannot be saved \(.*\); use text and numbers"):
            session.save(tmp_path / "s")
    assert not (tmp_path / "s").exists()
