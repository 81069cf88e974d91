"""Long work is reported repeatedly, and short work not at all."""

import logging
import time

import pytest

from triforce_tree.runtime import progress_log
from triforce_tree.runtime.progress_log import log_on_stderr, logged


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "_FIRST", 0.02)
    monkeypatch.setattr(progress_log, "_EVERY", 0.05)


def test_long_work_is_told_of_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with log_on_stderr(), logged("counting"):
        time.sleep(0.3)
    out, err = capsys.readouterr()
    first, *more, last = err.splitlines()
    assert out == ""
    assert first == "counting ..."
    assert more
    assert all(line.startswith("counting, ") and line.endswith(" s so far ...") for line in more)
    assert last.startswith("counting: 0.")


def test_short_work_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with log_on_stderr(), logged("counting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_python_is_quiet_until_its_log_is_asked_for(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with logged("counting"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, "triforce_tree.loading"), logged("counting"):
        time.sleep(0.1)
    assert "counting ..." in caplog.text


def test_only_the_first_rank_tells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with log_on_stderr(), logged("counting"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with logged("counting"):
            time.sleep(0.05)
            raise KeyboardInterrupt

    with log_on_stderr(), pytest.raises(KeyboardInterrupt):
        failing()
    said = capsys.readouterr().err
    time.sleep(0.15)
    assert said
    assert capsys.readouterr().err == ""
