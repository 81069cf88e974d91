"""The command line's streams, files of rows, pictures and tables on narrow terminals."""

import errno
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run
from triforce_tree.cli import console, entry


def test_a_picture_needs_matplotlib_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "bench", "needle", "--plot", "map.png")
    assert (code, out) == (2, "")
    assert "pip install matplotlib" in err
    assert len(err.splitlines()) == 1


def test_a_closed_stdin_is_an_empty_one(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run(capsys, "generate", *pair.options)
    assert (code, out) == (2, "")
    assert "the prompt on stdin is empty" in err
    sys.stdin.close()
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, "generate", prompt, *pair.options, "--max-new-tokens", "3")[0] == 0
    sys.stdin.close()


@pytest.mark.skipif(sys.platform == "win32", reason="its shells cannot close a stream")
@pytest.mark.parametrize(
    ("streams", "said"), [(">&-", "stdout is closed"), (">&- 2>&-", ""), ("<&- >&-", "stdout")]
)
def test_a_closed_stdout_is_reported(streams: str, said: str) -> None:
    command = f"{sys.executable} -m triforce_tree demo {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("triforce-tree: " + said if said else "")
    assert len(done.stderr.splitlines()) == bool(said)


def test_a_full_disk_behind_stdout_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(entry, "import_module", full)
    code, _, err = run(capsys, "demo")
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("triforce-tree: No space left on device, where stdout or stderr goes; free some")


def test_memory_of_the_cpu_that_runs_out_ends_with_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: Any) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 3 bytes")

    monkeypatch.setattr("triforce_tree.cli.demo.run", short)
    code, _, err = run(capsys, "demo")
    assert code == 1
    assert "out of memory" in err
    assert "bfloat16" not in err
    assert len(err.splitlines()) == 1


def test_a_file_of_rows_is_a_data_set(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path
) -> None:
    """Read without the hub; a broken file and a missing column are errors in one line."""
    rows, text = tmp_path / "rows.jsonl", Path(pair.text).read_text(encoding="utf-8")
    rows.write_text("".join(json.dumps({"body": text[n : n + 3000]}) + "\n" for n in (0, 3000)))
    argv = ["bench", "text", *pair.options, "--dataset", str(rows), "--context", "90", "--new-tokens", "4"]
    argv += ["--prompts", "2", "--methods", "triforce-autoregressive", "--temperatures", "0", "--json"]
    code, out, _ = run(capsys, *argv, "--column", "body")
    assert code == 0
    assert len(last_object(out)["rows"]) == 1
    code, _, err = run(capsys, *argv)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "has no column 'text'; its columns: body" in err
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    code, _, err = run(capsys, *[str(empty) if word == str(rows) else word for word in argv])
    assert (code, len(err.splitlines())) == (2, 1)
    assert "cannot be read (it has no rows); give a .jsonl" in err
    rows.write_text('{"text": "a"}\n{"text')
    code, _, err = run(capsys, *argv)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "rows.jsonl' cannot be read" in err
    rows.write_text("")
    assert run(capsys, *argv)[0] == 2


def test_narrow_terminals_get_whole_columns() -> None:
    columns = ("level", "passes", "per pass", "what was done")
    rows = [("draft", "12", "3.5 %", "some more " * 4)]
    table = console.plain_table("what each level did", columns, rows)
    for width in range(16, 90):
        screen = Console(file=io.StringIO(), width=width)
        screen.print(table)
        shown, _, left_out = screen.file.getvalue().partition("too narrow for: ")
        assert "…" not in shown
        # The last column is wrapped before it goes.
        for name in columns[:3]:
            assert (name in shown) is (name not in " ".join(left_out.split()))
    assert "what was done" in shown
