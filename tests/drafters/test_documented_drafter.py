"""The example drafter in the documents runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "drafter.md"


def test_the_documented_drafter_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    held: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), held)
    out = held["out"]
    assert capsys.readouterr().out.strip() == out.text.strip()
    drafter, target = out.levels
    assert drafter.name == "bigrams"
    assert target.emitted == 32


def test_every_drafter_of_the_package_is_named() -> None:
    text = (PAGE.parents[1] / "drafters.md").read_text(encoding="utf-8")
    for name in (
        "tree_model.py",
        "suffix_matching.py",
        "with_lookup.py",
        "heads/medusa.py",
        "heads/eagle.py",
    ):
        assert name in text
        assert (PAGE.parents[2] / "triforce_tree" / "drafters" / name).is_file()
