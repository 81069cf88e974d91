"""Tests what the checks share, and the links at the repository's top."""

import json
from typing import Any

import pytest


def test_a_report_ends_with_a_line_of_json(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = script("checks.report").Report()
    report.add("good", True, figure=3)
    assert report.finish() == 0

    def wrong() -> None:
        raise ValueError("2 is not 3")

    report.attempt("returns", lambda: None)
    report.attempt("raises", wrong)
    report.attempt("too far", lambda: {"passed": False, "error_ratio": 2.5})
    assert report.finish(device="cpu") == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = [row["check"] for row in last["failed"]]
    assert (last["checks"], failed, last["device"]) == (4, ["raises", "too far"], "cpu")
    assert last["failed"][0]["error"] == "2 is not 3"


def test_the_links_at_the_top_have_targets(
    script: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = script("checks.check_wheel")
    wheel.check_links()
    package = tmp_path / "triforce_tree"
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    monkeypatch.setattr(wheel, "PACKAGE", package)
    for name in wheel.LINKS:
        (package / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(f"triforce_tree/{name}")
    wheel.check_links()
    (package / "verify").rmdir()
    with pytest.raises(SystemExit, match="verify is a link to triforce_tree/verify, which does not exist"):
        wheel.check_links()
