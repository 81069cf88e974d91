"""On a busy machine decoding slows down only by its share, and uses at most as many threads as CPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.models.program_cases import model
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime import cpu_threads

# Decodes with the C kernels and torch's operators; prints its seconds alone and with other processes.
_DECODING = """
import json, sys, time, subprocess
for name in sys.argv[2:]:
    __import__(name)
import torch, transformers, triforce_tree
sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2048}
heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
engine = triforce_tree.load(model, levels=1)
prompt = torch.arange(64)[None] + 100
def seconds():
    begin = time.perf_counter()
    engine.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None)
    return time.perf_counter() - begin
seconds()
alone = min(seconds() for _ in range(5))
spin = [sys.executable, "-c", "while True: pass"]
others = [subprocess.Popen(spin) for _ in range(int(sys.argv[1]))]
try:
    time.sleep(0.3)
    beside = min(seconds() for _ in range(3))
finally:
    for other in others:
        other.kill()
        other.wait()
print(json.dumps({"alone": alone, "beside": beside, "threads": torch.get_num_threads()}))
"""


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "triforce_tree"])
def test_decoding_beside_others_takes_its_share(first: str) -> None:
    """With three other threads for each of ours, 4 times the time is fair; with spinning it took 40 times."""
    environment = {name: value for name, value in os.environ.items() if name not in _OPENMP}
    competitors = 3 * len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _DECODING, str(competitors), first]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["beside"] < 10 * found["alone"], found


_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, processes: int) -> Iterator[None]:
    """Makes this process one of ``count`` processes of torchrun on this host."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    cpu_threads.usable_cpus.cache_clear()
    yield
    monkeypatch.undo()
    cpu_threads.usable_cpus.cache_clear()


def test_processes_of_a_host_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with limited(monkeypatch, 10_000), HFModel(model("llama-gqa")).active():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 4, "as the caller had set it"
        torch.set_num_threads(1)
        with HFModel(model("llama-gqa")).active():
            assert torch.get_num_threads() == 1, "what the caller has set is a limit"
    finally:
        torch.set_num_threads(before)


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(text)


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    assert list(cpu_threads.quotas(groups, tmp_path)) == [], "on other systems"
    # In version 2 of control groups the quota of a group also limits the groups inside it.
    mounted = tmp_path / "two"
    groups.write_text("0::/machine/job\n")
    _group(mounted / "machine", max="150000 100000\n")
    _group(mounted / "machine" / "job", max="max 100000\n")
    assert list(cpu_threads.quotas(groups, mounted)) == [1.5]
    _group(mounted / "machine" / "job", max="400000 100000\n")
    assert sorted(cpu_threads.quotas(groups, mounted)) == [1.5, 4.0]
    # In a container the group is mounted at the root, under another path than the host's.
    _group(tmp_path / "inside", max="200000 100000\n")
    groups.write_text("0::/../../elsewhere\n1:memory:/job\n")
    assert list(cpu_threads.quotas(groups, tmp_path / "inside")) == [2.0]
    # Version 1 of control groups.
    groups.write_text("4:cpu,cpuacct:/job\n3:memory:/job\n")
    _group(tmp_path / "one" / "cpu" / "job", cfs_quota_us="50000\n", cfs_period_us="100000\n")
    _group(tmp_path / "one" / "cpu", cfs_quota_us="-1\n", cfs_period_us="100000\n")
    assert list(cpu_threads.quotas(groups, tmp_path / "one")) == [0.5]
