"""Files that are replaced in a single step."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from triforce_tree.runtime.files.json_files import JsonTable
from triforce_tree.runtime.files.writing import replace_file

CALLS = {"open", "write", "close", "replace", "rename", "unlink", "mkdir", "fsync", "chmod"}


def killed_at(number: int, path: Path, content: str) -> bool:
    """Replaces a file in a process that is killed before one of its calls; returns whether it survived."""
    child = os.fork()
    if not child:
        left = [number]

        def profile(frame: object, event: str, function: object) -> None:
            if event == "c_call" and getattr(function, "__name__", "") in CALLS:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(profile)
        replace_file(path, content)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_killed_at_any_call(tmp_path: Path) -> None:
    path, seen = tmp_path / "table.json", []
    for number in range(1, 100):
        path.write_text("earlier")
        lived = killed_at(number, path, "new and longer")
        seen.append(path.read_text())
        if lived:
            break
    assert seen == sorted(seen)
    assert set(seen) == {"earlier", "new and longer"}
    assert len(seen) > 4


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    replace_file(path, "earlier")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(path, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("table.json", "earlier")]


def test_links_permissions_and_pipes(tmp_path: Path) -> None:
    """Links and permissions are kept, and special files are written in place."""
    (tmp_path / "file").write_text("earlier")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    replace_file(tmp_path / "link", "new é")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new é"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    read, write = os.pipe()
    replace_file(f"/proc/self/fd/{write}", b"bytes")
    assert os.read(read, 10) == b"bytes"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"entr', b"\xff\xfe", b"[[[[", b"3"])
def test_an_unreadable_table_is_made_anew(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    table = JsonTable(path, 10, "it is measured again")
    assert table.entries() == {}
    table.put("key", {"value": 1})
    assert JsonTable(path, 10, "").entries() == {"key": {"value": 1}}
