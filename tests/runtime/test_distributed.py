"""Tensor parallelism: the shard of each rank, equal tokens on all ranks, and failures. CPU and gloo.

On a machine with two GPUs the embedded pair's tokens on two GPUs are compared with those on one.
"""

import json
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.support.models import tiny_pair
from tests.support.models.families import greedy, tiny, with_rounded_kv
from tests.support.processes import parallel_ranks
from tests.support.processes.processes import PATIENCE, environment, results_of
from triforce_tree.cli.entry import main
from triforce_tree.models import tensor_parallel
from triforce_tree.models.few_row import FewRowLinear, few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import RowParallel, shard, shards_of
from triforce_tree.runtime import distributed
from triforce_tree.runtime.distributed import Group

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of all checks by rank."""
    return results_of("parallel_ranks.py", "checks", tmp_path_factory.mktemp("ranks"))


@cache
def expected(kv_bits: int = 16) -> list[int]:
    target = parallel_ranks.models()[0]
    if kv_bits == 8:
        target = with_rounded_kv(target)
    ids = parallel_ranks.PROMPT
    return greedy(target, ids, parallel_ranks.NEW, attention_mask=torch.ones(1, len(ids)))


@pytest.mark.slow
class TestTwoRanks:
    def test_collective_operations(self, results: list[dict[str, Any]]) -> None:
        for rank in (result["communication"] for result in results):
            assert rank["object"] == {"rank": 0}
            assert rank["flag"] is True
            assert rank["gathered"] == [0, 1]
            assert rank["minima"] == [0, -1, 2**50]
            assert rank["tensor"] == [[0.0] * 3] * 2
            assert rank["sum"] == [3.0, 3.0]
            assert rank["agreed"] == [5, 0]
            assert rank["refusal"].startswith("numbers of rank 1 differ from rank 0's")

    @pytest.mark.parametrize("family", parallel_ranks.SHARDED)
    def test_logits_equal_the_unsharded_models(self, results: list[dict[str, Any]], family: str) -> None:
        whole = HFModel(tiny(family)).heads
        for result in results:
            error, *heads = result["logits"][family]
            assert error < 1e-5
            assert heads == [whole.query // 2, whole.kv // 2, whole.dim, whole.value_dim]

    @pytest.mark.parametrize("setup", parallel_ranks.SETUPS)
    def test_greedy_tokens_equal_the_unsharded_targets(
        self, results: list[dict[str, Any]], setup: str
    ) -> None:
        own = expected(parallel_ranks.SETUPS[setup].get("kv_bits", 16))
        assert [result["generations"][setup] for result in results] == [own] * 2

    def test_a_session_keeps_what_all_ranks_hold(self, results: list[dict[str, Any]]) -> None:
        asked = [*parallel_ranks.PROMPT, *expected(), 1, 2, 3]
        own = greedy(parallel_ranks.models()[0], asked, 8, attention_mask=torch.ones(1, len(asked)))
        for result in results:
            tokens, reused = result["generations"]["session"]
            assert tokens == asked + own
            assert reused >= len(asked) - 4

    def test_sampled_tokens_are_equal_on_all_ranks(self, results: list[dict[str, Any]]) -> None:
        first, second = (result["generations"] for result in results)
        assert first == second
        assert first["offloaded, sampled"] != expected()

    def test_sampled_tokens_equal_those_of_one_process(self, results: list[dict[str, Any]]) -> None:
        alone = parallel_ranks.generated(parallel_ranks.engine(), do_sample=True, top_k=0, seed=7)
        assert [result["generations"]["on the device, sampled"] for result in results] == [alone] * 2
        assert alone != expected()

    def test_the_embedded_pairs_tokens_equal_those_of_one_process(self, tmp_path: Path) -> None:
        alone = parallel_ranks.pair()
        assert results_of("parallel_ranks.py", "pair", tmp_path) == [alone] * 2
        assert alone["on the device"] == alone["offloaded"]

    def test_a_compiled_layer_has_one_all_reduce_operator(self, results: list[dict[str, Any]]) -> None:
        assert [result["graph"] for result in results] == [{"all_reduces": 1, "error": 0.0}] * 2

    def test_rank_0_decides(self, results: list[dict[str, Any]]) -> None:
        first, second = (result["decisions"] for result in results)
        assert first == second
        assert first["stopped"] == 5
        assert first["plan"]["cpu_gbps"] > 0
        assert first["different prompts"].startswith("prompts of rank 1 differ from rank 0's")
        assert len(set(first["no seed"])) > 5
        assert [first["room"], first["room on rank 0"]] == [[8, expected()], [16, expected()]]

    @pytest.mark.slow
    def test_torchrun_prints_the_text_once(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """It is started twice, as on two machines with a process each."""
        pair = tiny_pair.make(tmp_path)
        prompt = tmp_path / "prompt.txt"
        prompt.write_text(Path(pair.text).read_text(encoding="utf-8")[:1500], encoding="utf-8")
        small = ["--budget", "128", "--levels", "3"]
        for option in ("chunk=8", "recent=32", "window=32"):
            small += ["--advanced", option]
        command = ["generate", str(prompt), *pair.options, *small, "--max-new-tokens", "12", "--json"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
        torchrun = ["torch.distributed.run", *where, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank"]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", *torchrun, str(node), "-m", "triforce_tree", *command, "--offload"],
                env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for node in (0, 1)
        ]  # fmt: skip
        try:
            (out, said), (other_out, other_said) = (each.communicate(timeout=PATIENCE) for each in started)
        finally:
            for process in started:
                process.terminate()
        assert [process.returncode for process in started] == [0, 0], said + other_said
        assert other_out == ""
        assert main(command) == 0
        *expected_text, expected_json = capsys.readouterr().out.splitlines()
        *text, json_line = out.splitlines()
        assert text == expected_text
        assert json.loads(json_line)["text"] == json.loads(expected_json)["text"]
        parts = "2 ranks: heads split over 2, the text over 1 (context_parallel 1)"
        for once in ("memory map", "what each level did", parts):
            assert (said.count(once), other_said.count(once)) == (1, 0)
        assert json.loads(json_line)["ranks"] == {"heads": 2, "positions": 1}


def test_the_shards_of_all_ranks_are_the_whole_model() -> None:
    whole, parts = tiny("qwen2"), [tiny("qwen2") for _ in range(2)]
    for rank, part in enumerate(parts):
        shard(part, Group(rank, 2, CPU))
        assert shards_of(part) == 2
    assert shards_of(whole) == 1
    for path, linear in whole.model.layers.named_modules():
        if type(linear) is not nn.Linear:
            continue
        shards = [part.model.layers.get_submodule(path) for part in parts]
        if isinstance(shards[0], RowParallel):
            assert torch.equal(torch.cat([m.linear.weight for m in shards], 1), linear.weight)
            assert all(m.linear.bias is None for m in shards)
        else:
            assert torch.equal(torch.cat([m.weight for m in shards]), linear.weight)
            if linear.bias is not None:
                assert torch.equal(torch.cat([m.bias for m in shards]), linear.bias)
    assert torch.equal(torch.cat([part.lm_head.weight for part in parts]), whole.lm_head.weight)
    assert torch.equal(parts[1].model.embed_tokens.weight, whole.model.embed_tokens.weight)


@pytest.mark.parametrize("size, tied", [(2, False), (3, True), (5, False), (66, True)])
def test_ranks_share_the_rows_of_a_head(size: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> PreTrainedModel:
        return tiny("llama-mqa", vocab_size=67, tie_word_embeddings=tied).to(torch.bfloat16)

    whole, parts = made(), [made() for _ in range(size)]
    for rank, part in enumerate(parts):
        shard(part, Group(0, 1, CPU), Group(rank, size, CPU))
        shard(part, Group(0, 1, CPU), Group(rank, size, CPU))  # which changes nothing
        assert part.lm_head.out_features == 67
        assert part.lm_head.linear.out_features == len(part.lm_head.weight) == -(-67 // size)
        in_place = part.lm_head.weight.untyped_storage().data_ptr()
        assert (in_place == part.model.embed_tokens.weight.untyped_storage().data_ptr()) == tied
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    gathered = torch.stack([part.lm_head.linear(x) for part in parts]).view(torch.uint8)
    monkeypatch.setattr(tensor_parallel, "all_gather_tensor", lambda own, group: gathered)
    for rank in (0, size - 1):
        monkeypatch.setattr(tensor_parallel, "current", lambda rank=rank: Group(rank, size, CPU))
        assert torch.allclose(parts[rank].lm_head(x), whole.lm_head(x), atol=1e-2)
        assert torch.equal(parts[rank].lm_head(x), parts[0].lm_head(x))


def test_a_quantised_head_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "quantisation", lambda model: "some library's")
    model = tiny("llama-gqa")
    shard(model, Group(0, 1, CPU), Group(1, 2, CPU))
    assert type(model.lm_head) is nn.Linear
    assert len(model.lm_head.weight) == 64


def test_few_row_copies_of_sharded_linears_share_their_weights() -> None:
    model = tiny("llama-gqa")
    shard(model, Group(1, 2, CPU))
    copied = few_row_copy(model).model.layers[0].self_attn.o_proj
    assert isinstance(copied, RowParallel)
    assert isinstance(copied.linear, FewRowLinear)
    assert copied.linear.weight is model.model.layers[0].self_attn.o_proj.linear.weight


@pytest.mark.parametrize(
    "family, size, message",
    [
        ("llama-gqa", 4, "2 key/value heads of LlamaForCausalLM cannot be shared evenly by 4 cards"),
        ("llama-mqa", 2, "1 key/value heads"),
        ("phi3", 2, "its plan asks for 'rowwise_split_input' of model.layers.0.self_attn.o_proj, a Linear"),
        ("olmo2", 2, "its plan asks for 'colwise_gather_output' of model.layers.0.self_attn.q_proj"),
        ("mixtral", 2, "its plan asks for 'moe_tp_experts' of model.layers.0.mlp.experts, a Mixtral"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_unchanged(family: str, size: int, message: str) -> None:
    model = tiny(family)
    before = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        shard(model, Group(0, size, CPU))
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == before


def test_mlp_features_must_be_divisible() -> None:
    model = tiny("llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=48, intermediate_size=64)
    with pytest.raises(ValueError, match=r"64 features of model.layers.0.mlp.gate_proj .* by 3 cards"):
        shard(model, Group(0, 3, CPU))


def test_a_model_without_a_tensor_parallel_plan_is_refused() -> None:
    model = tiny("llama")
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(ValueError, match="LlamaForCausalLM has no tensor-parallel plan in transformers"):
        shard(model, Group(0, 2, CPU))


def test_a_norm_over_several_heads_is_refused() -> None:
    model = tiny("qwen3")
    model.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"of model.layers.0.self_attn.q_norm, a Qwen3RMSNorm"):
        shard(model, Group(0, 2, CPU))


def test_a_single_process_joins_no_group() -> None:
    assert distributed.join() is None
    assert distributed.current() is None
    assert distributed.is_first_rank()
    assert distributed.broadcast_object(7) == 7
    assert distributed.broadcast_flag(True)
    assert distributed.all_gather_object(7) == [7]
    assert distributed.all_reduce_min([1.0, 2.0]) == [1.0, 2.0]


def test_other_commands_refuse_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["check"]) == 2
    assert capsys.readouterr().err == (
        "triforce-tree, rank 1: this command runs in one process, without torchrun; only generate takes "
        "several\n"
    )
    assert main(["generate", "-"]) == 2
    assert "name a file with the prompt" in capsys.readouterr().err


def test_out_of_memory_on_one_rank_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = parallel_ranks.engine(offload=True)._hierarchy
    monkeypatch.setattr(distributed, "current", lambda: Group(1, 2, CPU))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"memory ran out on rank 1 of 2 \(.* GiB are free\), and several ranks"
    ):
        hierarchy.shrink()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 1 of this machine has no GPU of its own: torch sees 1"):
        distributed.join("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device='cuda:0', but under torchrun process 1 .* uses 'cuda:1'"):
        distributed.join("cuda:0")
