"""The command line within this process: exit code, stdout, stderr."""

import json
from typing import Any

import pytest

from triforce_tree.cli.entry import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as end:  # raised by argparse
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def last_object(out: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result
