"""Every kernel on every usual GPU, without one: a sample compiled here, all of it in the results file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles with Triton; install triton to run it")

from triforce_tree.kernels.device import KNOWN

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((ROOT / "docs/results/kernels_by_arch.json").read_text())
    return made


@pytest.mark.slow
def test_a_sample_compiles_within_every_limit(tmp_path: Path) -> None:
    """In a process of its own, because this one has loaded Triton to be interpreted."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "scripts/kernels_by_arch.py", "--every", "101", "--jobs", "2"]
    out = tmp_path / "sample.json"
    made = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, env=plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["arch"] for row in rows} == set(KNOWN)
    assert {"tree_attention_kernel", "linear_kernel"} <= {row["kernel"] for row in rows}
    assert not out.with_suffix(".part").exists()


def test_the_results_are_of_the_tiles_that_are_chosen_now(script: Any, result: dict[str, Any]) -> None:
    """After a change of a table or a limit: python scripts/kernels_by_arch.py --out docs/results/..."""
    digest = script("kernel_variants").digest
    assert result["choices"] == {arch: digest(device) for arch, device in KNOWN.items()}
    assert {row["arch"] for row in result["rows"]} == set(KNOWN)


def test_the_results_are_within_every_limit(script: Any, result: dict[str, Any]) -> None:
    assert list(script("kernels_by_arch").faults(result["rows"])) == []


def test_faults_are_found(script: Any) -> None:
    faults = script("kernels_by_arch").faults
    row = {
        "kernel": "linear_kernel", "variant": "v", "arch": "sm_89", "shared_bytes": 101_376,
        "limit_bytes": 101_376, "spill_bytes": 64,
    }  # fmt: skip
    assert list(faults([row])) == []
    assert list(faults([row | {"shared_bytes": 101_377}])) == [
        "sm_89, linear_kernel, v: 101,377 bytes of shared memory of 101,376"
    ]
    assert list(faults([row | {"spill_bytes": 1000}])) == [
        "sm_89, linear_kernel, v: spills 1000 bytes, 64 are allowed"
    ]
    assert list(faults([row | {"serialized": True}])) == [
        "sm_89, linear_kernel, v: products wait for each other"
    ]
    broken = {
        "kernel": "linear_kernel",
        "variant": "v",
        "arch": "sm_89",
        "error": "sub.bf16x2 requires sm_90",
    }
    assert list(faults([broken])) == ["sm_89, linear_kernel, v: sub.bf16x2 requires sm_90"]
