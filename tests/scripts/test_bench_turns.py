"""The benchmark of conversations: traces of coding agents, and runs with a tiny pair."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "name": None, "tool_call_id": None, "tool_calls": None, **more}


def _record(issue: str) -> dict[str, Any]:
    """A record with the columns of SWE-rebench-openhands-trajectories that are read, and some others."""
    function = {"name": "bash", "arguments": json.dumps({"command": "ls"})}
    call = {"id": "call_1", "type": "function", "function": function}
    return {
        "trajectory_id": issue, "instance_id": "owner__name-1", "repo": "owner/name", "resolved": 1,
        "trajectory": [
            _message("system", "You are an agent."),
            _message("user", issue),
            _message("assistant", "", tool_calls=[call]),
            _message("tool", "setup.py", name="bash", tool_call_id="call_1"),
            _message("assistant", "Done."),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_recorded_trajectories_are_rendered_up_to_each_reply(script: Any, tmp_path: Path, kind: str) -> None:
    turns = script("benchmarks.requests.turns")
    records = [_record(f"Issue {number}.") for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    given = str(tmp_path / "train.jsonl" if kind == "file" else tmp_path)
    first, second = turns.trajectories(given, 1, 2)
    assert (first[1]["content"], second[1]["content"]) == ("Issue 2.", "Issue 3.")
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None
    plain = [tokenizer.decode(ids) for ids in turns.turn_prompts(tokenizer, first, 1000)]
    begin = "<|system|>\nYou are an agent.\n<|user|>\nIssue 2.\n<|assistant|>\n"
    assert plain == [begin, f'{begin}bash {{"command": "ls"}}\n<|tool|>\nsetup.py\n<|assistant|>\n']
    tokenizer.chat_template = _TEMPLATE
    one, two = (tokenizer.decode(ids) for ids in turns.turn_prompts(tokenizer, first, 1000))
    assert one == "[system]You are an agent.[user]Issue 2.[assistant]"
    assert two.startswith(one + "bash=")
    assert two.endswith("[tool]setup.py[assistant]")


def test_traces_that_cannot_be_used_are_refused(script: Any, tmp_path: Path) -> None:
    turns = script("benchmarks.requests.turns")
    path = tmp_path / "few.jsonl"
    path.write_text(json.dumps(_record("Issue.")) + "\n")
    with pytest.raises(ValueError, match="fewer than 2 trajectories"):
        turns.trajectories(str(path), 0, 2)
    path.write_text(json.dumps({"text": "no messages"}) + "\n")
    with pytest.raises(ValueError, match=r"no column 'trajectory'.*text"):
        turns.trajectories(str(path), 0, 1)
    with pytest.raises(ValueError, match="no reply after at most 5 tokens"):
        turns.turn_prompts(load_tokenizer(PAIR / "target"), _record("Issue.")["trajectory"], 5)


def test_synthetic_traces_are_determined_by_their_seed(script: Any) -> None:
    turns = script("benchmarks.requests.turns")
    first, again, other = (list(itertools.islice(turns.synthetic(seed), 120)) for seed in (3, 3, 4))
    assert first == again
    assert first[0] == other[0]
    assert first[1] != other[1]
    used = set()
    for message, following in itertools.pairwise(first):
        for call in message.get("tool_calls", ()):
            assert (following["role"], following["tool_call_id"]) == ("tool", call["id"])
            arguments = json.loads(call["function"]["arguments"])
            used.add(call["function"]["name"])
            if "diff" in arguments:
                removed, added = (
                    sum(line.startswith(sign) for line in arguments["diff"].splitlines()) for sign in "-+"
                )
                assert removed == added > 1
    assert used == {"grep", "view", "apply_patch", "run"}


def test_synthetic_prompts_grow(script: Any) -> None:
    turns = script("benchmarks.requests.turns")
    tokenizer = load_tokenizer(PAIR / "target")
    prompts = turns.turn_prompts(tokenizer, turns.synthetic(0), 6000)
    assert len(prompts) > 5
    for short, long in itertools.pairwise(prompts):
        assert long[: len(short)] == short
        assert len(short) < len(long) <= 6000
    assert turns.turn_prompts(tokenizer, turns.synthetic(0), 6000, 3) == prompts[:3]


def test_an_offloaded_cache_is_not_dropped_by_plain_decoding(script: Any) -> None:
    """Host memory holds one at a time, and each turn needs that of the turn before."""
    run = script("benchmarks.requests.conversation")
    engine = run.random_engine("offloaded (Llama)", {"prefix_cache": "1GiB"})
    mine, other = ([list(range(n, n + 30)) for n in range(first, first + 120, 40)] for first in (10, 900))
    for rows in run.measured(engine, run.CASES, mine, other, 4, recorded=False):
        for before, row in itertools.pairwise(rows):
            assert row["reused_tokens"] == row["plain_reused_tokens"] == before["prompt_tokens"] + 3
            assert row["own_prefill_seconds"] > 0


@pytest.mark.release
def test_both_kinds_of_turns_are_measured_into_one_file(script: Any, tmp_path: Path) -> None:
    run, tables = (script(f"benchmarks.requests.{name}") for name in ("conversation", "tables"))
    words = ["--tiny", "--kinds", "embedded pair", "--out", str(tmp_path)]
    assert run.main([*words, "--trace", "synthetic"]) == 0
    assert run.main(words) == 0
    # One case alone keeps the rows of the other.
    assert run.main([*words, "--cases", "alone"]) == 0
    content = content_at(tmp_path / tables.CONVERSATION.format(machine="cpu"))
    assert content["parts"].keys() == {"synthetic", "questions"}
    assert content["parts"]["synthetic"]["versions"].keys() >= {"torch", "rich"}
    for part, count in (("synthetic", 3), ("questions", 4)):
        for case in ("alone", "beside another"):
            turns = [row for row in content["turns"] if (row["part"], row["case"]) == (part, case)]
            assert [row["turn"] for row in turns] == [*range(1, count + 1)]
            for before, row in itertools.pairwise(turns):
                assert row["reused_tokens"] + row["new_tokens"] == row["prompt_tokens"] - 1
                assert row["reused_tokens"] >= before["prompt_tokens"] - 1
                assert row["speedup"] == row["plain_ms_per_token"] / row["ms_per_token"]
                timed = part == "questions"
                assert (row["own_prefill_seconds"] is not None) == timed
            assert all(0 < row["prefill_seconds"] < row["first_token_seconds"] for row in turns)
    for name, line in (
        ("conversation_cpu", "| embedded pair | alone | early 1 |"),
        ("conversation_agent_cpu", "| synthetic | embedded pair | beside another | late 1 |"),
    ):
        assert line in tables.TABLES[name].make(content)
    assert len(tables.agent_rows(content, "turns")) == 6
