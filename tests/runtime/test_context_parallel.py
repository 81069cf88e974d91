"""Context parallelism: the KV slots of one text split over ranks. CPU and gloo."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import greedy, tiny
from tests.support.processes import context_ranks
from tests.support.processes.context_ranks import NEW, OPEN, PROMPT, SAMPLED, SETUPS, THREE, WINDOWS
from tests.support.processes.processes import results_of
from triforce_tree import load
from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention import prefill, reference
from triforce_tree.kv.parallel.store import SequenceSplit
from triforce_tree.runtime.distributed import Group

CPU = torch.device("cpu")


@cache
def expected(family: str) -> list[int]:
    return greedy(tiny(family), PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


@cache
def sampled_alone(name: str) -> list[int]:
    family, options = SETUPS[name]
    made = context_ranks.engine(family, **options)
    return context_ranks.generated(made, do_sample=True, top_k=0, seed=7)


def check(results: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for name in names:
        own = expected(SETUPS[name][0])
        assert [result[name] for result in results] == [own] * len(results), name
        sampled = [result[f"{name}, sampled"] for result in results]
        assert sampled == sampled[:1] * len(results), name
        assert sampled[0] != own
        if name in SAMPLED:
            assert sampled[0] == sampled_alone(name), name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("context_ranks.py", "two", tmp_path_factory.mktemp("two"), 2)


@pytest.mark.slow
class TestRanks:
    def test_tokens_over_two_ranks_equal_those_of_one_process(self, two: list[dict[str, Any]]) -> None:
        check(two, tuple(SETUPS))

    def test_sequences_of_a_batch_over_two_ranks(self, two: list[dict[str, Any]]) -> None:
        model = tiny("llama-gqa")
        for row, prompt in enumerate((PROMPT, PROMPT[:61], PROMPT[:3])):
            own = greedy(model, prompt, NEW, attention_mask=torch.ones(1, len(prompt)))
            assert [result["batch"][row][-NEW:] for result in two] == [own] * 2

    def test_a_session_goes_on_over_two_ranks(self, two: list[dict[str, Any]]) -> None:
        asked = [*PROMPT, *expected("llama-gqa"), 1, 2, 3]
        own = greedy(tiny("llama-gqa"), asked, 8, attention_mask=torch.ones(1, len(asked)))
        for result in two:
            tokens, reused = result["session"]
            assert tokens == asked + own
            assert reused >= len(asked) - 4

    def test_each_rank_has_half_of_the_slots(self, two: list[dict[str, Any]]) -> None:
        for result in two:
            rows, most, no_windows = result["slots"]
            assert no_windows
            # Both ranks have slots for the new tokens of a pass.
            assert most / 2 <= rows < 0.6 * most

    def test_two_collectives_a_layer(self, two: list[dict[str, Any]]) -> None:
        # Two layers; three queries of four heads of 8 elements, with a log-sum-exp each, and three hidden
        # states of 32; then half of the logits.
        calls, sizes = two[0]["traffic"]
        assert calls == {"all_gather": 2 + 1, "all_reduce": 2}
        assert sizes == {"all_gather": 2 * 3 * 4 * (8 * 4 + 4) + 3 * 32 * 4, "all_reduce": 2 * 3 * 32 * 4}

    def test_ranks_share_neurons_and_not_heads(self, two: list[dict[str, Any]]) -> None:
        inner = tiny("llama-gqa").config.intermediate_size
        for result in two:
            assert result["shards"] == [1, 2, inner // 2]

    def test_other_numbers_than_the_models_were_loaded_for_are_refused(
        self, two: list[dict[str, Any]]
    ) -> None:
        for result in two:
            same, other, no_divisor = result["refused"]
            assert same == ""
            assert other.startswith("context_parallel=4, but the target was loaded for another number")
            assert no_divisor.startswith("context_parallel=3 needs a multiple of 3 processes, and this is 2")

    def test_three_ranks_share_fewer_kv_heads(self, tmp_path: Path) -> None:
        check(results_of("context_ranks.py", "three", tmp_path, 3), ("three levels", "one KV head", *WINDOWS))

    def test_four_ranks_split_text_and_heads(self, tmp_path: Path) -> None:
        check(results_of("context_ranks.py", "four", tmp_path, 4), ("three levels", "two levels", *WINDOWS))

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_ranks_choose_a_split_that_is_possible(self, size: int, tmp_path: Path) -> None:
        results = results_of("context_ranks.py", "open_split", tmp_path, size)
        for name, (family, _) in OPEN.items():
            heads = {"two KV heads": 2, "one KV head": 1, "three KV heads": 3}[name]
            target = tiny(family, **(THREE if heads == 3 else {}))
            own = greedy(target, PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))
            for ranks, tokens in (result[name] for result in results):
                assert tokens == own, name
                assert ranks["heads"] * ranks["positions"] == size
                # The heads are split as far as possible, since this splits the weights too.
                assert ranks["heads"] == max(n for n in (1, 2, 3) if size % n == 0 and heads % n == 0)
            assert results[0]["kept"][1] == own or name != "three KV heads"
        for result in results:
            assert result["kept"][0] == result["three KV heads"][0]["positions"]
            if size == 2:
                assert result["refused"] == 1
            else:
                assert result["refused"].startswith("2 key/value heads of LlamaForCausalLM cannot be shared")
                assert "does not work with kv_bits=8" in result["refused"]


@pytest.mark.parametrize("size, block", [(2, 4), (3, 8), (5, 1)])
def test_every_position_is_kept_by_one_rank_in_order(size: int, block: int) -> None:
    splits = [SequenceSplit(Group(rank, size, CPU), block) for rank in range(size)]
    positions = torch.arange(200)
    assert torch.equal(sum(s.keeps(positions).int() for s in splits), torch.ones(200, dtype=torch.int32))
    for split in splits:
        running = torch.cat([torch.zeros(1).long(), split.keeps(positions).cumsum(0)])
        lengths = torch.arange(201)
        assert torch.equal(split.counts(lengths), running)
        assert [split.count(n) for n in range(201)] == running.tolist()
        assert all(split.most(n) >= split.count(n) for n in range(201))
    assert [split.has_tail for split in splits] == [False] * (size - 1) + [True]


@pytest.mark.parametrize("start", range(9))
def test_each_accepted_token_is_kept_by_the_rank_of_its_position(start: int) -> None:
    path = torch.tensor([[0, 2, 5, 7, -1, -1], [0, 1, 4, -1, -1, -1]])
    starts = torch.tensor([start, start + 3])
    # The KV slots of positions start + i after the move, from the slots of both ranks.
    for row, (first, own) in enumerate(zip(starts.tolist(), path.tolist(), strict=True)):
        found: dict[int, int] = {}
        for rank in range(3):
            split = SequenceSplit(Group(rank, 3, CPU), 2)
            kept = split.kept(path, starts)[row].tolist()
            mine = [p for p in range(first, first + 6) if split.keeps(torch.tensor(p))]
            found |= dict(zip(mine, kept, strict=False))
            assert set(kept[len(mine) :]) <= {-1}
        assert [found[first + i] for i in range(6)] == own


@pytest.mark.parametrize(
    "options, message",
    [
        ({"offload": True}, "does not work with an offloaded cache"),
        ({"gpu_memory": "24GiB"}, "does not work with an offloaded cache"),
        ({"kv_bits": 8}, "does not work with kv_bits=8"),
        ({"select_chunks": print}, "does not work with select_chunks"),
        ({"context_parallel": 0}, "context_parallel=0 must be an integer of at least 1"),
    ],
)
def test_what_does_not_combine_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HierarchyConfig.from_options(**{"context_parallel": 2, **options})


def test_one_process_has_nothing_to_choose() -> None:
    made = load(tiny("llama"))
    assert made.config.context_parallel == 1
    assert made.generate(PROMPT[:9], max_new_tokens=2, do_sample=False).ranks is None
    with pytest.raises(ValueError, match="context_parallel='heads' must be an integer"):
        made.with_options(advanced={"context_parallel": "heads"})


def test_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel=2 needs a multiple of 2 processes"):
        load(tiny("llama"), advanced={"context_parallel": 2})


@pytest.mark.parametrize("softcap, sinks", [(None, False), (5.0, True)])
@pytest.mark.parametrize("causal, positions", [(True, 9), (True, 30), (False, 30), (False, 1)])
def test_attention_to_a_part_has_its_log_sum_exp(
    softcap: float | None, sinks: bool, causal: bool, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_SCORES", 1)
    monkeypatch.setattr(prefill, "_QUERIES", 4)
    q = torch.randn(1, 4, 9, 8)
    k, v = torch.randn(2, 1, 2, positions, 8)
    logits = torch.randn(4) if sinks else None
    found = prefill.attention_states(q, k, v, scale=0.4, causal=causal, softcap=softcap, sinks=logits)
    mask = torch.ones(9, positions).tril(positions - 9 if causal else positions).bool()
    exact = reference.tree_attention(q, k, v, mask, scale=0.4, softcap=softcap, sinks=logits)
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
