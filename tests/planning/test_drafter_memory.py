"""Heads, their caches, hidden states and buffers in a memory plan, beside what is allocated."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.distributions.block_folders import block_folder, spark_folder, speculators_folder
from tests.support.distributions.head_folders import eagle_folder, medusa_folder, mtp
from tests.support.models.families import perturbed, tiny
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.hierarchy import Hierarchy
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.blocks.drafter import BlockDrafter
from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.medusa import Medusa
from triforce_tree.drafters.registry import trained_drafter
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Machine, Sizes, activations, workspace
from triforce_tree.planning.memory_plan import plan
from triforce_tree.trees.device_shapes import pass_limits
from triforce_tree.verify.seeded import Seeded

OPTIONS: dict[str, Any] = {"budget": 64, "chunk": 4, "recent": 16, "gamma": 6, "sinks": 2, "window": 24}
BATCH, LENGTH = 3, 1024


def tensors(held: object, depth: int = 0) -> Iterator[Tensor]:
    """Yields all tensors that an object holds, in lists, closures and objects of drafters too."""
    own = type(held).__module__.startswith("triforce_tree.drafters")
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for part in held:
            yield from tensors(part, depth)
    elif callable(held) and getattr(held, "__closure__", None):
        for cell in held.__closure__:
            yield from tensors(cell.cell_contents, depth)
    elif isinstance(held, nn.Module):
        if own or "Norm" in type(held).__name__ or type(held).__name__ == "MtpModel":
            yield from held.parameters()
    elif own and depth < 3:
        for name, part in vars(held).items():
            if name != "_state":
                yield from tensors(part, depth + 1)


def drafters(folder: Path, target: nn.Module) -> dict[str, Drafter]:
    return {
        "medusa": Medusa(medusa_folder(folder / "medusa", target)),
        "medusa, the target's head": Medusa(medusa_folder(folder / "tied", target, layers=2, tied=True)),
        "eagle": Eagle3(eagle_folder(folder / "eagle", target, 40), sinks=2, window=24),
        "p-eagle": trained_drafter(
            eagle_folder(folder / "parallel", target, ptd_token_id=1, num_hidden_layers=2), {"window": 24}
        ),
        "three mtp layers": mtp(target, "best-first:2,2,1", 3, 2, 24),
        "eagle, own embeddings": Eagle3(
            eagle_folder(folder / "own", target, embeddings=True), tree="static:0;1;0.0", sinks=4, window=32
        ),
        "block": BlockDrafter(block_folder(folder / "block", target, inputs=(0,)), sinks=2, window=24),
        "DSpark": BlockDrafter(spark_folder(folder / "spark", target, inputs=(0,)), sinks=2, window=24),
        "DSpark, the target's matrices": BlockDrafter(
            spark_folder(folder / "shared", target, inputs=(0,), own=False), "chain:3", 2, 24
        ),
        "speculators": BlockDrafter(speculators_folder(folder / "speculators", target, inputs=(1,))),
        "suffix": SuffixMatching(15),
    }


NAMES = [
    "medusa", "medusa, the target's head", "eagle", "eagle, own embeddings", "p-eagle", "three mtp layers",
    "block", "DSpark", "DSpark, the target's matrices", "speculators", "suffix",
]  # fmt: skip


@pytest.mark.parametrize(("levels", "name"), [*((3, name) for name in NAMES), (2, "eagle"), (2, "block")])
def test_planned_bytes_are_those_that_are_allocated(levels: int, name: str, tmp_path: Path) -> None:
    target = tiny("llama-gqa")
    drafter = drafters(tmp_path, target)[name]
    config = HierarchyConfig.from_options(levels=levels, **OPTIONS)
    hierarchy = Hierarchy(HFModel(target), drafter, config)
    program = hierarchy.program([[1] * LENGTH] * BATCH, 0)
    sizes = Sizes.of(hierarchy.target, None, hierarchy.config, drafter)
    planned = memory_map.drafter(sizes, hierarchy.config, levels, program.max_seq_len, BATCH)
    shared = {id(p) for p in target.parameters()}
    for held in (drafter, getattr(drafter, "drafter", None)):
        # As they were read, in host memory.
        if held is not None:
            vars(held).pop("_weights", None)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors(drafter)
        if id(t) not in shared
    }
    allocated = sum(storages.values())
    states = program.state.features
    kept = 0 if states is None else sum(states._states[layer].nbytes for layer in states.layers)
    assert planned.get("hidden states for the drafter", 0) == kept
    own = sum(planned.values()) - kept
    assert own == pytest.approx(allocated, rel=0.03, abs=4096), planned


def test_a_plan_counts_them() -> None:
    target = tiny("llama-gqa")
    config = HierarchyConfig.from_options(offload="auto", levels=3, **OPTIONS)
    models = HFModel(target), HFModel(perturbed(target, 0.1))
    machine = Machine(GIB, GIB, 5e10, 4e12)
    without, beside = (
        plan(Sizes.of(*models, config, drafter), machine, config, OPTIONS, Workload(2, 300, 84))
        for drafter in (None, SuffixMatching(8))
    )
    buffers = beside.device["drafter's buffers"]
    # Eight tokens of eight bytes for each of two sequences.
    assert buffers == 2 * 8 * 8
    assert without.device["free"] - beside.device["free"] == buffers
    assert "drafter's buffers" not in without.device


def test_an_engine_plans_with_its_drafter(tmp_path: Path) -> None:
    target = tiny("llama-gqa")
    drafter = drafters(tmp_path, target)["medusa"]
    config = HierarchyConfig.from_options(gpu_memory="1GiB", **OPTIONS)
    made = Hierarchy(HFModel(target), drafter, config).plan_memory([200], 50)
    assert made is not None
    assert made.device["heads"] == drafter.weight_bytes > 0
    assert made.device["hidden states for the drafter"] > 0
    alone = Hierarchy(HFModel(target), None, config).plan_memory([200], 50)
    assert alone is not None
    assert alone.device["drafter's buffers"] > 0
    assert torch.is_tensor(drafter._blocks[0][0])


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_noise_by_position_is_planned_for(levels: int) -> None:
    """Any request may give sequences seeds: beside the buffers of passes without them."""
    config = HierarchyConfig.from_options(tree="best-first:4,3", **OPTIONS)
    sizes = Sizes(0, 0, 2, 4, 2, 8, 32, 64, vocabulary=1000)
    own, wider = (workspace(s, config, levels, BATCH) for s in (sizes, replace(sizes, vocabulary=2000)))
    limits = pass_limits(config, levels)
    state = SimpleNamespace(
        batch=BATCH, max_draft_tokens=limits.max_draft_tokens, extra=limits.extra, device="cpu"
    )
    noise = Seeded(state, 1000).exponential
    tokens = 2 * config.gamma + 1 if levels == 3 else limits.nodes
    unseeded = BATCH * (6 * tokens + 8 * limits.nodes) * 1000 * 4
    gathered = BATCH * tokens * 1000 * 4
    assert wider - own >= unseeded + gathered + noise.nbytes


def test_each_shape_of_tree_has_buffers_of_its_own() -> None:
    sizes = Sizes(0, 0, 2, 4, 2, 8, 32, 64, vocabulary=1000)
    tree = "best-first:4,4"

    def bytes_of(levels: int = 2, **options: Any) -> int:
        return workspace(sizes, HierarchyConfig.from_options(**{"tree": tree, **options}), levels, BATCH)

    alone, chain = bytes_of(), bytes_of(other_trees="chain:3")
    # Probs and noise of four more nodes, beside their activations.
    assert chain - alone > BATCH * 4 * 8 * sizes.vocabulary * 4
    assert bytes_of(other_trees="chain:3 chain:2") > chain
    assert bytes_of(1, other_trees="chain:3") == bytes_of(1)


def test_a_shape_takes_memory_for_the_sequences_that_may_take_it() -> None:
    """Passes of more than 16 sequences verify no 31 matched tokens."""
    sizes = Sizes(0, 0, 2, 4, 2, 8, 32, 64, vocabulary=1000)
    short, both = (
        HierarchyConfig.from_options(tree="best-first:4,4,4,4,4,4,4,3", other_trees=others)
        for others in ("lookup:7", "lookup:7 lookup:31")
    )

    def added(batch: int) -> int:
        return workspace(sizes, both, 2, batch) - workspace(sizes, short, 2, batch)

    of_one = 32 * (32 * sizes.vocabulary + 4 * activations(sizes))
    assert pass_limits(both, 2).nodes == pass_limits(short, 2).nodes == 32
    # Proposals of 31 tokens are longer than the tree, whose noise they share.
    deeper = added(2) - added(1) - of_one
    assert deeper > 0
    for batch, taking in ((1, 1), (16, 16), (17, 16), (32, 16)):
        assert added(batch) == batch * deeper + taking * of_one
