"""Tests which split of a text over ranks is chosen, by estimates that are compared with measured times."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from scripts.benchmarks.common.results import content_at
from scripts.inflate.shapes import SHAPES
from tests.support.models.families import tiny
from tests.support.models.recurrent_families import recurrent
from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.parallel.choice import Link, Ranks, chosen, pass_seconds

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "sequence_parallel_h200x2.jsonl"
# Of the measured machine, and of one whose cards are further apart.
READ = 4.2e12


def skeleton(positions: int, shape: str = "llama-3.1-8b", **more: Any) -> PreTrainedModel:
    own = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=own.hidden, num_hidden_layers=own.layers, num_attention_heads=own.heads,
        num_key_value_heads=more.pop("kv_heads", own.kv_heads), head_dim=own.head_dim,
        intermediate_size=own.mlp, vocab_size=own.vocabulary, max_position_embeddings=positions, **more,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measured() -> dict[tuple[str, int, str], dict[str, Any]]:
    rows = content_at(RESULTS)["rows"]
    found = {(r["shape"], r["context"], r["way"]): r for r in rows if r["cards"] == 2 and "ms" in r}
    assert len(found) >= 6
    return found


# Estimates leave out arithmetic, which also bounds a pass of 31 tokens.
@pytest.mark.parametrize("stage, tokens, near", [("plain", 1, 0.25), ("target", 31, 0.4)])
def test_estimates_are_close_to_measured_times_and_of_their_order(
    stage: str, tokens: int, near: float
) -> None:
    ranks = Ranks(2, 2, READ)
    times: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for (shape, context, way), row in measured().items():
        model = skeleton(context, shape)
        seconds = pass_seconds(model, 2 if way == "by position" else 1, ranks, tokens)
        # The stage of level 2 drafts a tree before its forward.
        forward = row["ms"][stage] - (row["ms"]["draft"] if stage == "target" else 0.0)
        assert 1e3 * seconds == pytest.approx(forward, rel=near), (shape, context, way)
        times.setdefault((shape, context), {})[way] = (seconds, forward)
    pairs = {text: of for text, of in times.items() if len(of) == 2}
    assert len(pairs) >= 3
    for text, of in pairs.items():
        estimated, found = ([of[way][i] for way in ("by heads", "by position")] for i in (0, 1))
        assert (estimated[0] < estimated[1]) == (found[0] < found[1]), text


@pytest.mark.parametrize(
    "size, kv_heads, expected",
    [(2, 8, 1), (8, 8, 1), (2, 1, 2), (16, 8, 2), (8, 2, 4), (6, 8, 3), (7, 8, 7), (1, 8, 1)],
)
def test_heads_are_split_as_far_as_they_divide(size: int, kv_heads: int, expected: int) -> None:
    model = skeleton(122_880, kv_heads=kv_heads)
    assert chosen(model, HierarchyConfig(), size, lambda: Ranks(size, size, READ)) == expected


def test_a_text_is_split_between_machines_whose_link_is_slow() -> None:
    # Heads over two cards of each machine: one step less between machines in every layer.
    model, config, slow = skeleton(8192), HierarchyConfig(), Link(1e-4, 1e9)
    assert chosen(model, config, 4, lambda: Ranks(4, 2, READ, between=slow)) == 2
    assert chosen(model, config, 4, lambda: Ranks(4, 4, READ, between=slow)) == 1


def test_what_needs_all_positions_on_every_rank_splits_heads_alone() -> None:
    def never() -> Ranks:
        raise AssertionError("nothing is to be measured where there is no choice")

    for options in ({"kv_bits": 8}, {"offload": True}, {"gpu_memory": "8GiB"}, {"select_chunks": print}):
        assert chosen(skeleton(8192), HierarchyConfig.from_options(**options), 4, never) == 1
    with pytest.raises(
        ValueError, match=r"8 key/value heads .* by 3 cards; .* nor can a text be split: .*kv_bits=8"
    ):
        chosen(skeleton(8192), HierarchyConfig(kv_bits=8), 3, never)


def test_quantised_weights_and_families_without_a_plan_split_texts_alone() -> None:
    ranks = Ranks(2, 2, READ)
    assert chosen(skeleton(8192), HierarchyConfig(), 2, lambda: ranks, "bitsandbytes") == 2
    assert chosen(tiny("phi3"), HierarchyConfig(), 2, lambda: ranks) == 2


def test_recurrent_layers_are_not_split_by_position() -> None:
    model = recurrent("qwen3-next")
    with pytest.raises(ValueError, match=r"context_parallel=3 is not possible with .* recurrent layers"):
        chosen(model, HierarchyConfig(), 3, lambda: Ranks(3, 3, READ))


def test_slots_of_windows_do_not_grow_with_the_text() -> None:
    free = Link(0.0, 1e30)

    def read(family: str, positions: int, context: int) -> float:
        ranks = Ranks(2, 2, 1.0, free, free)
        return pass_seconds(tiny(family, max_position_embeddings=positions), context, ranks, 1)

    # Two layers of 2 heads of 8 elements, a key and a value, in fp32.
    slot = 2 * 2 * 2 * 8 * 4
    for context in (1, 2):
        assert read("mistral", 4096, context) - read("mistral", 2048, context) == 1024 * slot
        assert read("mistral-window", 4096, context) == read("mistral-window", 2048, context)
        assert read("gemma2", 4096, context) - read("gemma2", 2048, context) == 1024 * slot / 2
    # A rank that splits a text has all heads of a window of 11 tokens, and all of attention's weights.
    more = read("mistral-window", 2048, 2) - read("mistral-window", 2048, 1)
    assert more == (11 * slot + sum(w.nbytes for w in attention_weights("mistral-window"))) / 2


def attention_weights(family: str) -> list[torch.Tensor]:
    return [w for name, w in tiny(family).named_parameters() if "self_attn" in name]
