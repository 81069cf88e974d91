"""The CPU's share of attention in a full-target pass, and its effect on the memory plan."""

from dataclasses import replace

import pytest

from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, HostRate, Machine, Sizes
from triforce_tree.planning.memory_plan import plan
from triforce_tree.planning.pass_time import HostKV

LLAMA_2_7B = Sizes(int(13.48e9), int(0.15e9), 32, 32, 32, 128, 4096, 11008, 32000)
LONG, H200_BUS = 122_880, 55e9
RATE = HostRate(((1, 60e9), (16, 40e9), (48, 20e9)))


def test_the_cpus_rate_is_interpolated_in_time_per_byte() -> None:
    assert [RATE.at(queries) for queries in (1, 16, 48)] == [60e9, 40e9, pytest.approx(20e9)]
    assert 1 / RATE.at(32) == pytest.approx((1 / 40e9 + 1 / 20e9) / 2)
    # Twice the queries are twice the arithmetic, which bounds the rate beyond the last point.
    assert RATE.at(96) == pytest.approx(10e9)


def test_cpu_and_bus_end_at_the_same_time() -> None:
    on_host = HostKV(60 * GIB, 0, 50e9, RATE)
    for queries in (1, 13, 49):
        share = on_host.share(queries)
        on_bus, on_cpu = (
            (1 - share) * on_host.kv_bytes / 50e9,
            share * on_host.kv_bytes / (0.95 * RATE.at(queries)),
        )
        assert on_cpu <= on_bus
        assert (1 - share - 1 / 32) / 50e9 < (share + 1 / 32) / (0.95 * RATE.at(queries))
        assert on_host.seconds(queries) == pytest.approx(on_bus)
    assert on_host.share(1) > on_host.share(13) > on_host.share(49) > 0.2
    # Bytes that always cross the bus leave a larger share to the CPU.
    with_others = HostKV(60 * GIB, 20 * GIB, 50e9, RATE)
    share = with_others.share(13)
    assert share >= on_host.share(13) + 3 / 32
    assert ((1 - share) * 60 + 20) / 50e9 >= share * 60 / (0.95 * RATE.at(13))
    assert HostKV(GIB, 100 * GIB, 50e9, RATE).share(13) == 1
    assert HostKV(0, GIB, 50e9, RATE).share(13) == 0
    few_cores = HostRate(((1, 2e9), (48, 1e9)))
    assert HostKV(60 * GIB, 0, 50e9, few_cores).share(13) == 0
    assert HostKV(60 * GIB, 0, 50e9, few_cores).seconds(13) == 60 * GIB / 50e9


def test_the_plan_gives_the_cpu_a_share() -> None:
    machine = Machine(24 * GIB, 512 * GIB, H200_BUS, 4.4e12, host_attention=RATE)
    config = HierarchyConfig.from_options(offload=True, host_attention=True)
    alone = plan(LLAMA_2_7B, replace(machine, host_attention=None), config, (), Workload(1, LONG, 256))
    made = plan(LLAMA_2_7B, machine, config, (), Workload(1, LONG, 256))
    assert alone.offload is not None
    assert made.offload is not None
    assert (alone.offload.host_share, alone.offload.plain_host_share) == (0, 0)
    assert alone.cpu is None
    queries = made.config.gamma + 1
    assert made.config.runner_ups is False
    assert made.offload.host_share == HostKV(made.host["KV"], 0, H200_BUS, RATE).share(queries)
    assert made.offload.plain_host_share > 1.3 * made.offload.host_share
    assert made.cpu == RATE.at(queries)
    assert made.pass_seconds < 0.8 * alone.pass_seconds
    assert made.config.gamma <= alone.config.gamma
    assert made.as_dict()["split"]["host_share"] == made.offload.host_share
    given = plan(
        LLAMA_2_7B, machine, replace(config, runner_ups=True), {"runner_ups"}, Workload(1, LONG, 256)
    )
    assert given.config.runner_ups is True
    assert given.offload is not None
    assert given.offload.host_share < made.offload.host_share
    single = plan(LLAMA_2_7B, machine, replace(config, levels=1), (), Workload(1, LONG, 256))
    assert single.offload is not None
    assert single.offload.host_share == single.offload.plain_host_share
    assert single.pass_seconds == pytest.approx(single.host["KV"] / (0.95 * 60e9 + H200_BUS), rel=0.06)


def test_attention_on_the_cpu_needs_an_offloaded_cache() -> None:
    for options in ({}, {"offload": False}):
        with pytest.raises(
            ValueError, match=r"host_attention=True .* nothing is offloaded; give offload=True"
        ):
            HierarchyConfig(host_attention=True, **options)
    with pytest.raises(ValueError, match="host_attention='yes' must be True, False or 'auto'"):
        HierarchyConfig(host_attention="yes", offload=True)
    assert HierarchyConfig(host_attention=True, gpu_memory="24GiB").offloads == "auto"
    assert HierarchyConfig().host_attention == "auto"
    assert HierarchyConfig(host_attention=False).offloads is False
