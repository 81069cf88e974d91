"""Every kernel on every usual GPU, without one: a sample compiled here, all of it in the results file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles with Triton; install triton to run it")

from scripts.benchmarks.common.results import content_at
from triforce_tree.kernels.device import KNOWN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    made: dict[str, Any] = content_at(ROOT / "docs/results/kernels_by_arch.jsonl")
    return made


@pytest.mark.release
def test_a_sample_compiles_within_every_limit(tmp_path: Path) -> None:
    """In a process of its own, because this one has loaded Triton to be interpreted."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.checks.kernels_by_arch", "--every", "1400", "--jobs", "1"]
    out = tmp_path / "sample.jsonl"
    made = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    kernels = content_at(out)["kernels"]
    archs, names = ({kind[key] for kind in kernels} for key in ("arch", "kernel"))
    assert archs <= set(KNOWN)
    assert min(len(archs), len(names)) >= 4, "which ones depends on the list of variants"
    assert not out.with_suffix(".part").exists()


def test_the_results_are_within_every_limit(script: Any, result: dict[str, Any]) -> None:
    checks = script("checks.kernels_by_arch.__main__")
    assert {kind["arch"] for kind in result["kernels"]} == set(KNOWN)
    assert list(checks.faults(result["kernels"])) == []


def test_faults_are_found(script: Any) -> None:
    checks = script("checks.kernels_by_arch.__main__")

    def faults(*rows: dict[str, Any]) -> list[str]:
        return list(checks.faults(checks.summary(list(rows))))

    row = {
        "kernel": "linear_kernel", "variant": "v", "arch": "sm_89", "shared_bytes": 101_376,
        "limit_bytes": 101_376, "spill_bytes": 64,
    }  # fmt: skip
    assert faults(row) == []
    assert faults(row | {"shared_bytes": 101_377}) == [
        "sm_89, linear_kernel, the largest: 101,377 bytes of shared memory of 101,376"
    ]
    assert faults(row | {"spill_bytes": 1000}) == [
        "sm_89, linear_kernel, v: spills 1000 bytes, 64 are allowed"
    ]
    assert faults(row | {"serialized": True}) == ["sm_89, linear_kernel, v: products wait for each other"]
    broken = {"kernel": "linear_kernel", "variant": "v", "arch": "sm_89", "limit_bytes": 101_376}
    broken["error"] = "sub.bf16x2 requires sm_90"
    assert faults(broken) == ["sm_89, linear_kernel, v: sub.bf16x2 requires sm_90"]
