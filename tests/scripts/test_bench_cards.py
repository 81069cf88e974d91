"""The benchmark of emulated cards: sizes and bounds, plans in the file, what a run measures."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.common.command import TINY_DRAFT, TINY_SHAPES
from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.emulated import run as cards
from scripts.benchmarks.emulated.card import CARDS, HOSTS, bounds, planned, sizes_of
from scripts.inflate.pair import inflate_pair
from scripts.inflate.shapes import SHAPES, Shape
from tests.support.models.tiny_pair import SMALL, TinyPair
from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.device import KNOWN
from triforce_tree.kernels.exchange import link
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.models.few_row import low_bit_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import memory_plan
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.planning.memory_plan import MemoryPlan

CARD = CARDS["rtx-4090"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name, bits", [("llama-3.1-8b", 16), ("llama-3.1-8b", 4), ("qwen3-30b-a3b", 4)])
def test_sizes_are_those_of_the_models(name: str, bits: int) -> None:
    shape, draft_shape, config = Shape.parse(TINY_SHAPES[name]), Shape.parse(TINY_DRAFT), HierarchyConfig()
    target, draft, _ = inflate_pair(shape, "cpu", torch.bfloat16, draft_shape)
    models = [HFModel(target if bits == 16 else low_bit_copy(target, bits)), HFModel(draft)]
    for model in models:
        model.dtype = torch.bfloat16  # On a CPU they compute in fp32.
    exact = Sizes.of(*models, config)
    found = sizes_of(shape, draft_shape, bits, config)
    # Buffers, such as rotary frequencies and the counters of kernels, are left out.
    assert found.weights == pytest.approx(exact.weights, rel=0.002)
    assert found.draft == pytest.approx(exact.draft, rel=0.01)
    alike = {"weights": exact.weights, "draft": exact.draft}
    assert replace(found, **alike) == exact


@pytest.mark.parametrize("name", cards.MODELS)
def test_a_bound_is_that_of_the_slower_memory(name: str) -> None:
    model, context = cards.MODELS[name], 122_880
    shape, config = SHAPES[model.shape], HierarchyConfig()
    sizes = sizes_of(shape, SHAPES["llama-68m"], model.bits, config)
    plan = planned(CARD, sizes, CARD.options, context, 128)
    assert isinstance(plan, MemoryPlan)
    cache = context * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    found = bounds(CARD, sizes, plan, context)
    on_host = cache - plan.device["resident KV"] if plan.offload is not None else 0
    for each in found.values():
        assert each["link_gb"] == pytest.approx(on_host / 1e9)
        assert each["ms"] == pytest.approx(1e3 * max(each["link_gb"] / 25, each["device_gb"] / 1008))
    active = shape.active / shape.experts if shape.experts else 1.0
    assert cache < 1e9 * found["plain"]["device_gb"] < cache + sizes.weights
    assert (found["plain"]["device_gb"] < found["pass"]["device_gb"]) == (active < 1)
    assert plan.peak <= 24 << 30
    assert plan.host_bytes <= 57.6 * 2**30


def test_plans_stay_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "--out", str(tmp_path), "--models", "7b"]
    assert cards.main(words) == cards.main([*words, "30b-a3b-4bit"]) == 0
    assert cards.main([*words, "--set", "host_memory=20GiB"]) == 0
    first, second, third = content_at(tmp_path / cards.PLANS)["rows"]
    assert [row["model"] for row in (first, second)] == ["llama-2-7b", "qwen3-30b-a3b in 4 bits"]
    assert first["plan"]["bus_gbps"] == 25
    assert first["tiles"].keys() == first["bounds"].keys() == {"plain", "pass"}
    assert "host memory" in third["refused"]
    assert capsys.readouterr().out.count("\n") == 4


def test_a_card_limits_the_link_and_on_a_gpu_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(card.arch in KNOWN for card in CARDS.values())
    with CARD.emulate(CPU) as slow:
        assert (slow.rate, slow.read) == (25e9, 1008e9)
        assert link.current() is slow
    assert link.current() is None


def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans that keep small pieces in host memory, although everything would fit."""
    decide = memory_plan.plan

    def plan(*args: Any) -> MemoryPlan:
        made = decide(*args)
        return replace(
            made, offload=Offload(0, 4096, 3), host={"KV": 1}, device=made.device | {"resident KV": 0}
        )

    monkeypatch.setattr(memory_plan, "plan", plan)


def test_a_run_counts_what_the_link_carries(
    tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_host(monkeypatch)
    before = os.environ.get("TRIFORCE_TREE_CACHE")
    monkeypatch.setattr(cards.Grid, "engine", lambda grid, *_: pair.load(**SMALL, **grid.options))
    monkeypatch.setattr(cards, "TINY_OPTIONS", {})
    hardware = cards.header(0)["hardware"]
    monkeypatch.setitem(HOSTS, hardware, HOSTS["NVIDIA H200"])
    words = ["--tiny", "--models", "7b", "--contexts", "256", "--temperatures", "0", "--new-tokens", "12"]
    words += ["--out", str(tmp_path)]
    assert cards.main(words) == 0
    [row] = content_at(tmp_path / "cards_cpu.jsonl")["rows"]
    assert cards.main(words) == 0, "nothing is missing"
    assert content_at(tmp_path / "cards_cpu.jsonl")["rows"] == [row]
    assert row["plan"]["offloaded"]
    assert os.environ.get("TRIFORCE_TREE_CACHE") == before
    # A plain token streams all keys and values that have left the window, two layers of 128 bytes a slot.
    least = 128 * 2 * 2 * (256 - SMALL["recent"] - 128) / CARD.link
    assert row["link_ms_per_token"]["plain"] >= 1e3 * least
    assert row["bound_ms_per_token"]["plain"] == row["bounds"]["plain"]["ms"] > 0
    assert row["prefill_link_seconds"] > 0
    shown, slower = row["projected"], HOSTS[hardware].read / CARD.rates.read
    carried = row["link_ms_per_token"]["ours"]
    assert shown["ms_per_token"] == pytest.approx(carried + slower * (row["ms_per_token"] - carried))
    assert shown["prefill_seconds"] == pytest.approx(row["prefill_seconds"] * 989 / 165.2)
    assert capsys.readouterr().out.count('"card"') == 2


def test_a_run_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cards.main(["--models", "7b"])
