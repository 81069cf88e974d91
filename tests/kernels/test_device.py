"""Descriptions of GPUs, tiles that fit them, the fallback, and the kernels with tiles of small GPUs."""

import json
import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")

from triton import OutOfResources

import triforce_tree
from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import ERROR_LIMIT, Case, run_case
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels import fitting
from triforce_tree.kernels.attention import configs
from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.device import INTERPRETER, KNOWN, VARIABLE, Device, describe, emulated
from triforce_tree.kernels.linear import configs as linear_configs
from triforce_tree.kernels.linear.configs import LinearConfig, row_block

HOPPER = KNOWN["sm_90"]
PAIR = Path(triforce_tree.__file__).parent / "pair"
# GPUs that are not in ``KNOWN``.
ANY = [
    replace(KNOWN["sm_89"], arch="sm_87", shared_bytes=size, shared_bytes_per_sm=size + 1024)
    for size in (81_920, 131_072, 166_912)
]


def test_a_device_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        major=8, minor=9, shared_memory_per_block_optin=101_376, shared_memory_per_multiprocessor=102_400,
        multi_processor_count=128,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    # An index that no other test uses, since descriptions are cached.
    assert describe(torch.device("cuda", 7)) == KNOWN["sm_89"]
    assert describe("cuda:7").capability == (8, 9)
    assert describe("cpu") == INTERPRETER
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = SimpleNamespace(
        gcnArchName="gfx942:sramecc+:xnack-", shared_memory_per_block=65_536, multi_processor_count=304,
        major=9, minor=4,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    # Its major version is 9, as Hopper's.
    assert describe("cuda:8") == KNOWN["gfx942"]
    assert not describe("cuda:8").dependent_launch


def test_a_device_can_emulate_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm_120")
    assert describe("cpu") == replace(KNOWN["sm_120"], emulated=True)
    monkeypatch.setenv(VARIABLE, "sm_42")
    with pytest.raises(ValueError, match=r"TRIFORCE_TREE_DEVICE='sm_42' is not a known GPU; use one of"):
        describe("cpu")
    with emulated(HOPPER):
        assert describe("cpu") is HOPPER
    monkeypatch.delenv(VARIABLE)
    assert describe("cpu") == INTERPRETER


def test_int8_keys_and_values_leave_room_for_more_stages() -> None:
    """Shared memory as ptxas reports it, of what 16 bits would need twice."""
    card = KNOWN["sm_89"]
    tile = configs.choose(4, 128, 2, card, 0, 1)
    assert (configs.choose(4, 128, 2, card).stages, tile.stages) == (2, 3)
    fewer = replace(tile, stages=2)
    assert configs.shared_bytes(fewer, 128, 2, card, 0, 1) == 41_984 + 128
    assert configs.shared_bytes(KernelConfig(64, 64, 4, 3, 2), 128, 2, card, 0, 1) == 58_368 + 128


@pytest.mark.parametrize("device", [*KNOWN.values(), *ANY], ids=lambda d: f"{d.arch}-{d.shared_bytes}")
def test_every_choice_fits(device: Device) -> None:
    widths = [(dim, dim) for dim in (16, 64, 80, 96, 128, 192, 256, 320, 512)]
    widths += [(192, 128), (96, 64), (12, 6), (64, 256), (320, 512), (64, 512), (576, 512)]
    for element_bytes, kv_bytes in ((2, 0), (2, 1), (4, 0)):
        for head_dim, value_dim in widths:
            for rows in (1, 4, 16, 17, 64, 65, 128, 129, 512):
                tile = configs.choose(rows, head_dim, element_bytes, device, value_dim, kv_bytes)
                needed = configs.shared_bytes(tile, head_dim, element_bytes, device, value_dim, kv_bytes)
                assert needed <= device.shared_bytes
                assert (needed + 1024) * tile.programs_per_sm <= device.shared_bytes_per_sm + 1024 * (
                    not device.ptx
                )
    for bits in (16, 8, 4):
        for rows in (1, 16, 17, 33, 64, 65, 128):
            for outs, ins in ((768, 768), (4096, 4096), (22_016, 4096), (28_672, 4096), (4096, 14_336)):
                cut = linear_configs.choose(bits, rows, outs, ins, device)
                needed = linear_configs.shared_bytes(cut, bits, row_block(rows), device)
                assert needed <= device.shared_bytes
                assert 1 <= cut.splits <= 8


def test_hopper_gets_the_configurations_measured_on_it() -> None:
    for head_dim, table in configs._PREFERRED.items():
        for most, tile in table:
            assert configs.choose(most, head_dim, 2, HOPPER) == tile
            assert configs.choose(most, head_dim, 2, HOPPER, head_dim) == tile
    for (head_dim, value_dim), table in configs._PREFERRED_WIDTHS.items():
        for most, tile in table:
            assert configs.choose(most, head_dim, 2, HOPPER, value_dim) == tile
    for bits, by_rows in linear_configs._TABLE.items():
        for rows, cuts in by_rows.items():
            least = 2049
            for most, block_n, width, warps, stages, tma, resident in cuts:
                splits = max(
                    1, min(8, 132 * resident // -(-least // block_n), -(-4096 * bits // (16 * width)))
                )
                expected = LinearConfig(block_n, width, splits, warps, stages, bool(tma))
                if most >= least:
                    assert linear_configs.choose(bits, rows, least, 4096, HOPPER) == expected
                least = min(most, 1 << 20) + 1


def test_configurations_for_a_4090() -> None:
    """Hopper's tile of plain decoding needs 139,264 bytes, and this card has 101,376."""
    card = KNOWN["sm_89"]
    assert configs.choose(1, 128, 2, card) == KernelConfig(16, 128, 4, 2, 1)
    assert configs.choose(64, 256, 2, card) == KernelConfig(64, 32, 8, 2, 1)
    assert configs.choose(1, 512, 2, card) == KernelConfig(16, 32, 8, 2, 1)
    assert configs.choose(64, 512, 2, card) == KernelConfig(32, 32, 8, 2, 1)
    assert configs.choose(64, 576, 2, card, 512) == KernelConfig(16, 32, 8, 2, 1)
    assert configs.choose(64, 512, 2, KNOWN["gfx942"]) == KernelConfig(16, 32, 8, 1, 1, edge_stages=1)
    assert linear_configs.choose(16, 1, 28_672, 4096, card).stages == 3
    with pytest.raises(ValueError, match="1,000 bytes of shared memory a block, too few"):
        configs.choose(1, 128, 2, replace(card, shared_bytes=1000))
    with pytest.raises(ValueError, match="sm_89 has 1,000 bytes"):
        linear_configs.choose(16, 1, 4096, 4096, replace(card, shared_bytes=1000))


def test_the_demo_fits_a_4090() -> None:
    """Its shared memory holds all tiles of the embedded pair, from plain decoding to the longest chain."""
    card = KNOWN["sm_89"]
    for name in ("target", "draft"):
        config = json.loads((PAIR / name / "config.json").read_text())
        width, inner, vocabulary = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or width // heads
        for rows in range(1, 129):
            for element_bytes in (2, 4):
                tile = configs.choose(rows * heads // kv_heads, dim, element_bytes, card)
                assert configs.shared_bytes(tile, dim, element_bytes, card) <= 101_376
            linears = [(heads * dim, width), (3 * heads * dim, width), (2 * inner, width), (width, inner)]
            for bits, (outs, ins) in product((16, 8, 4), [*linears, (vocabulary, width)]):
                cut = linear_configs.choose(bits, rows, outs, ins, card)
                assert linear_configs.shared_bytes(cut, bits, row_block(rows), card) <= 101_376


@triton_ops.runs_kernels
@pytest.mark.parametrize("arch", ["sm_89", "sm_120", "gfx1100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_tiles_of_small_devices_compute_attention(arch: str, dtype: torch.dtype) -> None:
    device = replace(
        KNOWN[arch], processors=5, dependent_launch=DEVICE == "cuda" and KNOWN[arch].dependent_launch
    )
    for case in (
        Case(Heads(4, 2, 128), ((130, 9),), dtype, window=50, softcap=5.0),
        Case(Heads(2, 1, 256), ((65, 37), (20, 3)), dtype),
        Case(Heads(2, 2, 192, 128), ((65, 37),), dtype),
        Case(Heads(1, 1, 512), ((35, 2),), dtype),
    ):
        with emulated(device):
            assert run_case(case, DEVICE) <= ERROR_LIMIT


def test_a_shortage_at_launch_takes_the_next_smaller_tile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_replaced", {})
    tried: list[Any] = []

    def launch(config: KernelConfig) -> KernelConfig:
        tried.append(config)
        if config.block_n * config.stages > 128:
            raise OutOfResources(139_264, 101_376, "shared memory")
        return config

    wanted = KernelConfig(16, 128, 4, 3, 1)
    with caplog.at_level(logging.WARNING):
        got = fitting.fitted(wanted, configs.smaller, launch)
    assert got == KernelConfig(16, 64, 4, 2, 1)
    assert len(caplog.records) == len(tried) - 1 == 2
    assert "needs 139,264 bytes of shared memory where the GPU has 101,376; continuing with" in caplog.text
    # The next launch begins with the configuration that fitted.
    tried.clear()
    assert fitting.fitted(wanted, configs.smaller, launch) == got
    assert tried == [got]

    def never(config: KernelConfig) -> None:
        raise OutOfResources(139_264, 101_376, "shared memory")

    with pytest.raises(fitting.KernelError, match=r"no smaller tile is left; run on the CPU"):
        fitting.fitted(wanted, configs.smaller, never)


def test_an_emulated_device_limits_shared_memory() -> None:
    made = SimpleNamespace(metadata=SimpleNamespace(shared=139_264))
    fitting.within(made, KNOWN["sm_89"])
    with pytest.raises(OutOfResources):
        fitting.within(made, replace(KNOWN["sm_89"], emulated=True))
    fitting.within(made, replace(HOPPER, emulated=True))


def test_smaller_linear_tiles_are_finite() -> None:
    cut: LinearConfig | None = LinearConfig(128, 256, 4, 4, 5)
    seen = []
    while cut is not None:
        seen.append(cut)
        cut = linear_configs.smaller(cut)
    assert seen[-1] == LinearConfig(32, 32, 4, 4, 1)
    # Counters are sized for tiles of at least as many columns.
    assert all(cut.block_n >= linear_configs.LEAST_BLOCK for cut in seen)


@pytest.mark.parametrize("arch", sorted(KNOWN))
@pytest.mark.parametrize("outs", [256, 2048, 4096, 6144, 22016, 128256])
@pytest.mark.parametrize("ins", [576, 4096, 11008])
def test_exact_linears_have_one_order_of_sums(arch: str, outs: int, ins: int) -> None:
    device = KNOWN[arch]
    numbers = (1, 16, 17, 33, 64, linear_configs.most_exact_rows(device))
    chosen = [linear_configs.choose_exact(rows, outs, ins, device) for rows in numbers]
    assert len({config.splits for config, _ in chosen}) == 1
    for rows, (config, block_m) in zip(numbers, chosen, strict=True):
        assert rows <= block_m
        assert config.splits == 1 or linear_configs.SPLIT_WORDS % config.width == 0
        # One kind of instruction: wgmma has at least 64 outputs.
        assert not device.shared_products or config.block_n >= 64
    if arch == "sm_90":
        plain = linear_configs.choose(16, 1, outs, ins, device)
        assert chosen[0] == (plain, 16) or outs <= 2048
