"""Workloads of texts that branch: shapes and bytes on paper, attention alone, what reports say of them."""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.benchmarks.attention.peers import compared
from scripts.benchmarks.attention.problems import Ceilings
from scripts.benchmarks.workloads import attention, measure, published
from scripts.benchmarks.workloads.shapes import FAMILIES, Workload, chosen, speculative
from scripts.benchmarks.workloads.storage import Problem
from triforce_tree.bench.results import Record, Records
from triforce_tree.kernels.attention.plan import Heads

CEILINGS = Ceilings(1e10, 1e11)
# DeFT's Table 17: TB read by RadixAttention and by DeFT-Flatten; 32 layers of 32 heads of 128 in 16 bits.
TABLE_17 = {
    "deft/few-shot-4000x20": (17.62, 1.68),
    "deft/few-shot-4000x30": (26.43, 2.10),
    "deft/few-shot-4000x50": (44.05, 2.94),
    "deft/sorting": (59.96, 12.40),
    "deft/document": (39.74, 10.57),
    "deft/keyword": (4.68, 0.58),
    "deft/set": (7.01, 1.04),
    "deft/speculative-32": (131.45, 4.10),
    "deft/speculative-64": (256.79, 4.11),
    "deft/speculative-128": (522.05, 4.16),
    "deft/speculative-256": (1044.10, 4.35),
}


def test_reads_on_paper_are_those_that_deft_published() -> None:
    for workload in chosen(TABLE_17):
        tokens = workload.iterations * 32 * 32 * (128 + 128) * 2
        by_sequences, by_nodes = TABLE_17[workload.name]
        assert workload.read_by_sequences * tokens / 1e12 == pytest.approx(by_sequences, rel=0.02)
        assert workload.stored * tokens / 1e12 == pytest.approx(by_nodes, rel=0.035)


def test_shapes_are_those_that_were_published() -> None:
    assert [len(chosen([family])) for family in FAMILIES] == [14, 15, 20, 2]
    [forest] = chosen(["pat/2,8,16,256:256,256,32,32"])
    assert forest.parents.count(-1) == 2
    assert (forest.queries, forest.stored) == (256, 2 * 256 + 8 * 256 + 16 * 32 + 256 * 32)
    assert {sum(forest.lengths[node] for node in path) for path in forest.paths} == {256 + 256 + 32 + 32}
    [many] = chosen(["long/32x256"])
    assert (many.queries, many.stored) == (32, 100_000 + 32 * 256)
    tree = speculative(7, prefix=10)
    assert tree.paths == [
        (0, 1),
        (0, 1, 2),
        (0, 1, 3),
        (0, 1, 2, 4),
        (0, 1, 2, 5),
        (0, 1, 3, 6),
        (0, 1, 3, 7),
    ]
    with pytest.raises(
        ValueError, match=r"'deft/none' is unknown; use a family \(deft, fasttree, pat, long\)"
    ):
        chosen(["deft/none"])


def random_workload(seed: int) -> Workload:
    """A forest of two roots whose inner nodes may ask too."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    parents = (-1, -1, *(drawn(node) for node in range(2, 12)))
    lengths = tuple(1 + drawn(40) for _ in parents)
    leaves = set(range(12)) - set(parents)
    return Workload("random", parents, lengths, tuple(n in leaves or not drawn(2) for n in range(12)))


def problem(workload: Workload, page: int = 16) -> Problem:
    return Problem(workload, Heads(4, 2, 32), page, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("way", [attention.BY_SEQUENCES, attention.SHARED_PAGES])
def test_ways_agree_with_the_definition(way: str) -> None:
    seed = int(torch.randint(2**31, ()))
    for workload in (random_workload(seed), speculative(9, prefix=21)):
        made = problem(workload, page=8)
        for seed_of_copy, call in enumerate(attention.WAYS[way](made, made.queries)):
            k, v = made.rows(seed_of_copy)
            for q, path, out in zip(made.queries, made.paths, call(), strict=True):
                weights = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 32), k[:, path]) * 32**-0.5
                exact = torch.einsum("hgn,hnd->hgd", weights.softmax(-1), v[:, path])
                torch.testing.assert_close(out, exact.view(4, 32), rtol=1e-4, atol=1e-5)


def test_a_measurement_has_bytes_on_paper_or_a_reason() -> None:
    made = problem(random_workload(3))
    found = attention.measure(made, attention.BY_SEQUENCES, CEILINGS)
    assert found["us"] > 0
    assert found["kv_bytes"] == made.workload.read_by_sequences * 2 * (32 + 32) * 4
    assert attention.measure(made, "FlashInfer cascade", CEILINGS)["reason"] == "not installed"


def test_a_wrong_result_gets_no_time() -> None:
    expected = torch.randn(3, 4)

    def calls(out: Tensor) -> list[Callable[[], Tensor]]:
        return [lambda: out]

    assert isinstance(compared(partial(calls, expected.clone()), expected), float)
    assert str(compared(partial(calls, expected * 1.1), expected)).startswith("another result: relative")


def test_the_artifacts_nodes_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    node = partial(SimpleNamespace, parent=-1, id=-1, seqlen=0, num_children=0)
    monkeypatch.setitem(
        sys.modules,
        "kv_tree_simple",
        SimpleNamespace(KVTreeNode=lambda: node(requests=[])),  # type: ignore[arg-type]
    )
    [workload] = chosen(["pat/1,8,512:32,512,256"])
    made = problem(workload)
    info, starts = published._tree_info(made)
    assert [n.id for n in info] == list(range(1 + 8 + 512))
    assert info[0].parent == -1
    assert all(n.parent < n.id for n in info)
    assert sorted(n.num_children for n in info) == [0] * 512 + [8] + [64] * 8
    for query, path in enumerate(made.paths):
        own = [n for n in info if query in n.requests]
        rows = torch.cat([torch.arange(starts[n.id], starts[n.id + 1]) for n in own])
        assert torch.equal(rows.sort().values, path.sort().values)


@pytest.mark.gpu
def test_all_ways_agree_on_a_gpu() -> None:
    heads, device = Heads(32, 8, 128), torch.device("cuda")
    for name in ("deft/few-shot-4000x20", "deft/speculative-64", "pat/2,8,16,256:256,256,32,32"):
        [workload] = chosen([name])
        made = Problem(workload, heads, 64, device, torch.bfloat16)
        for way in attention.WAYS:
            found = attention.measure(made, way, CEILINGS)
            # What is installed may decline a shape, and may not give another result.
            assert "another result" not in found.get("reason", ""), (name, way, found)
        for way in (attention.BY_SEQUENCES, attention.SHARED_PAGES):
            assert attention.measure(made, way, CEILINGS).get("us", 0) > 0


def records(*found: Record) -> Records:
    made = Records(None, {"benchmark": "any"})
    for record in found:
        made.add(record)
    return made


def test_workloads_are_shown_with_what_was_not_measured() -> None:
    def alone(way: str, **more: Any) -> Record:
        return {
            "kind": "attention", "workload": "long/1x256", "way": way, "texts": 1, "seen": 200_000,
            "layers": 32, "kv_bytes": 2_000_000, "roof_us": 5.0, **more,
        }  # fmt: skip

    def decoded(workload: str, way: str, texts: int, seconds: float) -> Record:
        return {
            "kind": "decoding", "workload": workload, "way": way, "texts": texts, "seconds": seconds,
            "new_tokens": 10 * texts, "kv_bytes": 2**30,
        }  # fmt: skip

    made = records(
        alone("by sequences", us=20.0), alone("by nodes, flattened", us=10.0),
        alone("FlashInfer cascade", reason="not installed"), decoded("long/1x256", "engine.tree", 1, 1.0),
        decoded("long/32x256", "engine.tree", 32, 2.0),
        decoded("long/32x256", "a batch of the texts", 32, 4.0),
    )  # fmt: skip
    by_sequences, flattened, absent = measure.of_attention(made)
    assert (flattened["us"], flattened["to_sequences"], flattened["of_roof"]) == (10.0, 2.0, 0.5)
    assert (absent["way"], absent["us"], absent["reason"]) == ("FlashInfer cascade", None, "not installed")
    assert by_sequences["to_sequences"] == 1.0
    one, many, batch = measure.of_decoding(made)
    assert one["ms_per_token"] == 100.0
    assert (many["tokens_per_second"], many["to_one_branch"], many["to_batch"]) == (160.0, 16.0, 2.0)
    assert batch["to_one_branch"] is None
