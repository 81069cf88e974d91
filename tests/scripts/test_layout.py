"""Files and folders stay small enough to be read."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_FILES = 350, 12


def test_files_and_folders_are_small() -> None:
    files = [path for name in ("triforce_tree", "scripts", "tests") for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 200
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    long = {path: lines for path, lines in lengths.items() if lines > MOST_LINES}
    assert not long, f"split files of more than {MOST_LINES} lines"
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    full = {folder: count for folder, count in folders.items() if count > MOST_FILES}
    assert not full, f"divide folders of more than {MOST_FILES} files"
