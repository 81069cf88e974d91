"""The paper's tables: published numbers, the cells that answer them, and what is shown of both."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.benchmarks.paper import attention, plan, published, tables, values
from scripts.benchmarks.paper.plan import Sizes
from tests.support.models.families import prompt_of, tiny
from triforce_tree.bench.results import Record, Records

SIZES = Sizes(2048, 32)


def run_of(*items: str, sizes: Sizes = SIZES, **more: Any) -> Records:
    """A run that was asked for these items and has measured nothing."""
    own = {"context": sizes.context, "new_tokens": sizes.new_tokens, "prompts": sizes.prompts}
    settings = {"benchmark": tables.BENCHMARK, **own, "budget": sizes.budget, "text": "pydoc"}
    records = Records(None, settings | {"target": "embedded", "draft": "default", **more})
    for item in items:
        records.add({"cell": plan.ASKED, "item": item})
    return records


def timed(records: Records, cell: Record, ms: float, **more: Any) -> None:
    acceptance = {"target": 0.75, "retrieval": 0.5}
    values = {"ms": ms, "plain_ms": 30.0, "ms_by_tokens": {"64": ms / 2}, "acceptance": acceptance, **more}
    records.add({**cell, "prompt": 0, **values})


def test_every_item_has_numbers_with_their_setup() -> None:
    found = published.items()
    assert list(found) == [
        *(f"table-{n}" for n in range(1, 9)), "figure-3", "figure-5", "figure-6",
    ]  # fmt: skip
    for item in found.values():
        assert item.figures
        places = [(f.row, f.column) for f in item.figures]
        assert len(set(places)) == len(places)
        assert all(f.value > 0 and f.model and f.hardware and f.context for f in item.figures)
        assert item.name in tables._NOTES
    ratio = found["table-3"]
    for figure in (f for f in ratio.figures if f.column == "speed-up"):
        [ours] = [f for f in ratio.figures if f.row == figure.row and f.column.startswith("TriForce")]
        [plain] = [f for f in ratio.figures if f.row == figure.row and f.column.startswith("AR")]
        assert plain.value / ours.value == pytest.approx(figure.value, abs=0.01)


def test_published_numbers_stand_in_the_rows_that_cells_answer() -> None:
    """A row of the plan that is spelled otherwise would stand beside its number, not in its line."""
    unanswered = {"table-3": 12, "table-6": 2}
    for name, item in published.items().items():
        known = {(line.row, line.column) for line in plan.lines(name, SIZES)}
        missing = [f for f in item.figures if (f.row, f.column) not in known]
        assert len(missing) == unanswered.get(name, 0), missing


@pytest.mark.parametrize("context", [256, 2048, 122_880])
def test_budgets_fit_their_contexts(context: int) -> None:
    sizes = Sizes(context, 32)
    for item in published.items():
        for cell in plan.cells_of(item, sizes):
            changes = cell.get("changes", {})
            budget = changes.get("budget", cell.get("budget", sizes.budget_at(cell["context"])))
            chunk = changes.get("chunk", plan.CHUNK)
            assert budget % chunk == 0
            assert chunk <= plan.recent_at(budget) <= budget - chunk
            assert budget <= cell["context"]
    assert Sizes(122_880, 256).budget_at(122_880) == plan.BUDGET


def test_a_cell_of_several_items_is_measured_once() -> None:
    keys = [key for name in published.items() for key in plan.cells_of(name, SIZES)]
    own = {"decoder": "triforce", "temperature": 0.0, "context": 2048, "batch": 1, "new_tokens": 32}
    same = [key for key in keys if own.items() <= key.items() and key["changes"] == {}]
    assert len(same) > 3
    assert len({json.dumps(key) for key in same}) == 1
    twice = plan.cells_of("table-4", replace(SIZES, prompts=2))
    assert {key["prompt"] for key in twice} == {0}
    assert {key["prompt"] for key in plan.cells_of("table-8", replace(SIZES, prompts=2))} == {0, 1}


def test_tables_have_both_numbers_and_what_differs() -> None:
    records = run_of("table-8", "table-1")
    timed(records, plan.speed(SIZES, "triforce"), 20.0)
    timed(records, plan.speed(SIZES, "triforce", gamma_2=1), 60.0)
    first, second = tables.tables(records)
    assert first.title.startswith("Table 1 (section 4.1)")
    assert "here" not in first.columns  # nothing of it was measured
    rows = {row[0]: list(row) for row in second.rows}
    setup = "Llama2-7B-128K, A100, 122K"
    assert rows["(a) gamma 1 = 2, gamma 2 = 6"][1:5] == ["speed-up", "2.31x", setup, "1.50x"]
    assert rows["(b) gamma 1 = 2, gamma 2 = 1"][4] == "0.50x"
    assert rows["(a) gamma 1 = 3, gamma 2 = 6"][4] == ""
    for word in ("Same as in the paper", "Different", "embedded pair", "2,048 tokens", "budget 256"):
        assert word in second.note
    assert second.note in second.markdown()
    [(place, figures), *_] = tables.cells(records).items()
    assert (dict(place)["item"], figures) == ("table-8", {"speed-up": 1.5})


def test_a_long_text_is_read_off_at_parts_of_its_length() -> None:
    records = run_of("table-7")
    [line, *_] = plan.lines("table-7", Sizes(2048, 64))
    assert line.of == 64
    timed(records, line.cells[plan.PAPER], 20.0)
    assert values.value(line, plan.PAPER, records) == 3.0
    assert values.value(line, plan.OURS, records) is None


def test_expected_tokens_of_trees_and_sequences() -> None:
    acceptance = [0.5, 0.25]
    assert values.expected_tokens(acceptance, "Sequoia", 1) == 1.5
    assert values.expected_tokens(acceptance, "independent sequences", 2) == 1.75  # both: 1 + 0.5 + 0.25
    assert values.expected_tokens([0.5], "independent sequences", 3) == 1.875
    for size in plan.TREE_SIZES:
        sequences = values.expected_tokens(acceptance, "independent sequences", size)
        assert sequences <= values.expected_tokens(acceptance, "Sequoia", size) + 1e-9


def test_attention_of_the_top_tokens() -> None:
    target, tokens = tiny("llama-gqa"), prompt_of(60)
    prompt, budget = 50, 7
    layers, kept = attention.recovered(target, tokens, prompt, budget)
    before = target.config._attn_implementation
    target.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = target(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        target.set_attn_implementation(before)
    assert len(layers) == len(weights) == len(kept[0])
    assert len(kept) == len(tokens) - prompt
    for number, layer in enumerate(weights):
        rows = layer[0, :, prompt - 1 :]  # [H_q, T, S]
        top = rows[:, :1, :prompt].topk(budget, dim=-1).indices
        held = rows.gather(-1, top.expand(-1, rows.shape[1], -1)).sum(-1)
        assert layers[number] == pytest.approx(float(held[:, 0].mean()), abs=1e-5)
        share = (held / rows[..., :prompt].sum(-1))[:, 1:].mean(0)
        torch.testing.assert_close(torch.tensor([one[number] for one in kept]), share)
    assert attention.sees_everything(target)
    assert not attention.sees_everything(tiny("mistral-window"))
