"""The notebook's code cells run in order, and show what its text says."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.release
@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    names: dict[str, Any] = {}
    said: dict[str, str] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "clear the outputs before committing"
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            said[cell["id"]] = out.getvalue()
    assert "length: 64 tokens" in said["sample"]
    levels = {line.split()[0]: int(line.split()[1]) for line in said["levels"].splitlines()}
    assert list(levels) == ["draft", "retrieval", "target"]
    assert levels["target"] <= 32, "most of its passes bring several tokens"
    assert "identical: True" in said["greedy"]
    ours, alone = (int(word) for word in said["greedy"].split() if word.isdigit())
    assert 2 * ours <= alone
    assert "└─ " in said["tree"]
    assert said["session"].count("417203") == 2
