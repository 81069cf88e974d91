"""Files of tensors: what safetensors reads, and what was written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from triforce_tree.sessions.tensor_files import Description, read_tensors, write_tensors

TENSORS = {
    "k": torch.arange(15, dtype=torch.int8).view(3, 5),
    "scale": torch.randn(3),
    "half": torch.randn(2, 1, 3).bfloat16(),
    "none": torch.empty(0, dtype=torch.int64),
}


@pytest.mark.parametrize("buffered", [False, True])
def test_what_is_written_is_read(buffered: bool, tmp_path: Path) -> None:
    """A tensor may begin at an offset that is no multiple of its elements' size."""
    path = tmp_path / "file"
    described = write_tensors(path, TENSORS)
    assert path.stat().st_size == described.size
    assert Description.from_json(described.as_json()) == described
    with path.open("rb") as file:
        found = read_tensors(file, described, torch.empty(1000, dtype=torch.uint8) if buffered else None)
    for other in (found, load_file(path)):
        assert other.keys() == TENSORS.keys()
        assert all(torch.equal(other[name], part) for name, part in TENSORS.items())
