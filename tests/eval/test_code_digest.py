"""Results files know the code they measured: another wording changes nothing, other code is told of."""

from pathlib import Path
from typing import Any

import pytest

from triforce_tree.eval.report import code_digest


@pytest.fixture
def digests() -> Any:
    return code_digest


def test_wording_is_not_code(digests: Any) -> None:
    code = 'def f(a: int) -> int:\n    """Once."""\n    return a + 1  # why\n'
    same = 'class C:\n    x = 1\n    """Of x."""\n'
    assert digests.code_alone("a.py", code.encode()) == digests.code_alone(
        "a.py", b'"""A module."""\ndef f(a: int) -> int:\n    "Another."\n\n    return (a + 1)\n'
    )
    assert digests.code_alone("a.py", same.encode()) == digests.code_alone("a.py", b"class C:\n    x = 1\n")
    assert digests.code_alone("a.py", code.encode()) != digests.code_alone(
        "a.py", code.replace("1", "2").encode()
    )
    c = b"/* Sums. */\nint sum(int a) { return a; } // done\n"
    assert digests.code_alone("a.c", c) == b"int sum(int a) { return a; }"


def test_an_area_is_all_that_its_modules_import(
    digests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__": "", "first": "import math\nfrom triforce_tree import second\n", "alone": "x = 1\n",
        "second": "from triforce_tree.deep.third import x\n", "deep/__init__": "", "deep/third": "x = 1\n",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "triforce_tree" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(digests, "ROOT", tmp_path)
    monkeypatch.setattr(digests, "AREAS", {
        "it": ("first.py", "*one.py", "!alone.py"), "some": ("first.py", "!deep/*.py"), "none": ("lost/*.py",)
    })  # fmt: skip

    def digest_now(area: str = "it") -> str:
        for known in (digests.digest, digests._imports, digests._file_digest):
            known.cache_clear()
        found: str = digests.digest(area)
        return found

    before, some = digest_now(), digest_now("some")
    (tmp_path / "triforce_tree/alone.py").write_text("x = 2\n")
    assert digest_now() == before
    (tmp_path / "triforce_tree/deep/third.py").write_text("x = 2\n")
    assert digest_now() != before
    assert digest_now("some") == some
    with pytest.raises(ValueError, match=r"area 'none': no file matches 'lost/\*\.py'; mend AREAS"):
        digests.digest("none")


def test_captions_say_what_has_changed(digests: Any) -> None:
    now = {"commit": "a1", "code": digests.digests(["linear"])}
    older = {"commit": "b2", "code": {"linear": "another"}}
    before = {"commit": "c3", "code": None}
    assert digests.mark({"": now}) == ""
    assert digests.mark({"": older}) == " (measured at commit b2; code under it has changed since)"
    assert digests.mark({"7b": now, "8b": older, "batch": before}) == (
        " (measured at commit b2 (8b); code under it has changed since; "
        "measured at commit c3 (batch); no digest of the code under it was kept)"
    )
    # No area is no digest: nothing of it could have changed.
    assert digests.state({}) == digests.state(None) == "no digest of the code under it was kept"
    assert digests.state({"gone": "x"}) == "code under it has changed since"


def test_figures_hold_over_a_change_that_is_known_to_leave_them(
    digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = digests.digest("linear")
    monkeypatch.setattr(digests, "SAME_FIGURES", {"before": now, "long before": "before"})
    assert digests.state({"linear": "before"}) is None
    assert digests.state({"linear": "long before"}) == "code under it has changed since"


def test_every_area_that_is_measured_exists(digests: Any) -> None:
    assert set(digests.digests(digests.AREAS)) == set(digests.AREAS)
