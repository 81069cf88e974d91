"""The setting ``other_trees``."""

from pathlib import Path

import pytest

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.shapes import BestFirst, Static, shape_name


def test_other_trees_are_checked_and_kept_in_order(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"paths": [[0, 0], [1]]}')
    config = HierarchyConfig(other_trees=f"chain:2 {path}")
    assert config.other_trees == ("chain:2", Static([(0, 0), (1,)]).name)
    path.unlink()
    assert config.shapes == (config.tree, *config.other_trees)
    assert HierarchyConfig(other_trees="none").shapes == (config.tree,)
    for alone in ({"rounds": 2}, {"levels": 1}):
        assert HierarchyConfig(other_trees="chain:2", **alone).shapes == (config.tree,)
    with pytest.raises(ValueError, match=r"other_trees names 3 trees.*name at most 2"):
        HierarchyConfig(other_trees="chain:1 chain:2 chain:3")
    with pytest.raises(ValueError, match=r"other_trees='bush:3' is no known shape.*lookup:12"):
        HierarchyConfig(other_trees="bush:3")
    assert [shape_name(s) for s in (BestFirst([2, 1]), "chain:2")] == ["best-first:2,1", "chain:2"]
