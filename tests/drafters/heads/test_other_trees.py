"""Heads with several tree shapes, of which each pass chooses one."""

from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from tests.support.distributions.block_folders import block_folder
from tests.support.distributions.head_folders import eagle_folder, medusa_folder
from tests.support.models.program_cases import GREEDY, NEW, PROMPTS, SMALL, finished, model, reference
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import drafter_bytes, grown_shapes
from triforce_tree.drafters.registry import trained_drafter
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.passes import PassKind
from triforce_tree.trees.device_shapes import pass_limits

OTHERS = "chain:3 best-first:5,4"


@pytest.mark.parametrize("kind", ["medusa", "eagle", "block"])
@pytest.mark.parametrize("levels", [2, 3])
def test_passes_take_all_shapes_of_heads(kind: str, levels: int, tmp_path: Path) -> None:
    target = model("llama-gqa")
    if kind == "block":
        folder = block_folder(tmp_path, target, inputs=(0,))
    else:
        folder = (medusa_folder if kind == "medusa" else eagle_folder)(tmp_path, target)
    drafter = trained_drafter(folder, {"tree": "static:0;1;0.0", "other_trees": OTHERS})
    held = HFModel(target)
    drafter.attach(held)
    shapes = drafter.shapes
    assert shapes == ("static:0;1;0.0", "chain:3", "best-first:5,4")
    options = {**SMALL, "rounds": None, "tree": shapes[0], "other_trees": shapes[1:]}
    config = HierarchyConfig.from_options(**options)
    program = DecodingProgram(held, drafter, config, 1, 150, levels)
    loop = DecodingLoop.over(program, GREEDY, 0, repeatable=True)
    kinds = cycle(PassKind(levels, 1, shape) for shape in (2, 0, 1))
    loop.policy.choose = lambda *_: next(kinds)
    [new] = finished(loop, PROMPTS[:1], NEW[:1])
    assert new == reference(target, PROMPTS[0], NEW[0])
    assert {taken.shape for taken in loop.passes} == {0, 1, 2}
    alone = trained_drafter(folder, {"tree": shapes[0]})
    alone.attach(held)
    limits = pass_limits(config, levels)
    several, one = (sum(drafter_bytes(d, 1, 200, limits, 32, 4).values()) for d in (drafter, alone))
    assert several > one, "memory plans count the buffers of all shapes"


def test_heads_refuse_shapes_that_are_too_deep_or_too_many(tmp_path: Path) -> None:
    folder = medusa_folder(tmp_path, model("llama-gqa"))
    with pytest.raises(ValueError, match="the tree has 9 depths"):
        trained_drafter(folder, {"other_trees": "chain:9"})
    with pytest.raises(ValueError, match="other_trees names 3 trees"):
        trained_drafter(folder, {"other_trees": "chain:1 chain:2 chain:3"})


@pytest.mark.parametrize("kind", ["medusa", "eagle", "block"])
def test_every_kind_has_a_tree_a_small_tree_and_a_chain(kind: str, tmp_path: Path) -> None:
    target = model("llama-gqa")
    make = {"medusa": medusa_folder, "eagle": eagle_folder, "block": partial(block_folder, inputs=(0,))}[kind]
    folder = make(tmp_path, target)
    drafter = trained_drafter(folder, {})
    sizes = [sum(shape.widths) for shape in grown_shapes(drafter)]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert [str(shape).partition(":")[0] for shape in drafter.shapes] == ["best-first", "best-first", "chain"]
    largest_first = drafter.shapes
    drafter.attach(HFModel(target))
    assert drafter.shapes == largest_first[::-1], "on a CPU each verified token has its price"
    assert drafter.tree == drafter.shapes[0]
    assert trained_drafter(folder, {"tree": "chain:2"}).shapes == ("chain:2",)
    others = trained_drafter(folder, {"other_trees": "chain:1"})
    others.attach(HFModel(target))
    assert others.shapes == (largest_first[-1], "chain:1")
