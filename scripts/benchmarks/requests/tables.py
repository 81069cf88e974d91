"""Tables of docs/sessions.md: whole requests, conversations, and clients of a server."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE, CPU_FILE = "requests_h200.jsonl", "requests_cpu.jsonl"
CONVERSATION = "conversation_{machine}.jsonl"
ALONE, BESIDE = "alone", "beside another"
# The parts of a conversation's file without a trace; with one, the part has the trace's name.
QUESTIONS, OF_RANDOM = "questions", "questions, random models"
SERVING_FILE = "serving_{machine}.jsonl"
SERVING = SERVING_FILE.format(machine="h200")
# The name of our server in it.
OURS = "triforce-tree"
REQUESTS: Columns = {
    "model": "{shape}", "request": "{turn}", "prompt": "{prompt_tokens:,}", "kept": "{reused_tokens:,}",
    "prefill, s": "{prefill_seconds:.2f}", "first token, s": "{first_token_seconds:.2f}",
    "of the cold one": "{of_cold_first_token:.1%}", "decode, s": "{decode_seconds:.2f}",
    "**whole, s**": "**{seconds:.2f}**", "plain, s": "{plain[seconds]:.2f}",
    "**speed-up**": "**{speedup:.2f}x**",
    "retrieval accepts": "?{acceptance[retrieval]:.2f}", "target accepts": "?{acceptance[target]:.2f}",
    "tokens a pass": "?{tokens_per_pass:.1f}",
}  # fmt: skip
_COMMAND = "python -m scripts.benchmarks requests"
_NOTE = (
    "One {hardware}, {dtype}, greedy, {new_tokens} new tokens, text {text}, medians of {runs} runs, torch "
    "{versions[torch]}. "
)


_CLIENTS: Columns = {
    "server": "{part}", "clients": "{clients}", "prompt, tokens": "{prompt_tokens:,}",
    "new, tokens": "{new_tokens:,}", "**tokens/s**": "**{tokens_per_second:,.1f}**",
    "first token, s: median": "?{first_token_seconds[p50]:.2f}", "p99": "?{first_token_seconds[p99]:.2f}",
    "a token, ms: median": lambda row: _ms(row["token_seconds"], "p50"),
    "its p99": lambda row: _ms(row["token_seconds"], "p99"),
    "longest gaps, ms: p99": lambda row: _ms(row["gap_seconds"], "p99"),
    "complete": "{complete} of {begun}", "drafted": "?{accepted_share:pct}",
}  # fmt: skip
_SERVING_NOTE = (
    "{hardware}, torch {versions[torch]}, {settings[shape]}; each client sends a request after a random "
    "pause of {settings[pause]} s, and the next one when it is answered; {settings[seconds]:.0f} s for a "
    "cell, after which requests are cut. "
)


def _by_cell(content: Record) -> list[Record]:
    """Returns the rows of all servers, those of one cell together."""
    return sorted(content["rows"], key=itemgetter("prompt_tokens", "clients", "new_tokens"))


def beside(content: Record) -> list[Record]:
    """Returns our server's row for each load, with the fastest of the others and the ratio of tokens/s."""
    found: dict[tuple[int, ...], dict[str, Record]] = {}
    for row in _by_cell(content):
        cell = (row["prompt_tokens"], row["clients"], row["new_tokens"])
        found.setdefault(cell, {})[row["part"]] = row
    made = []
    for rows in found.values():
        ours = rows.pop(OURS, None)
        if ours and rows:
            other = max(rows.values(), key=lambda row: float(row["tokens_per_second"]))
            ratio = ours["tokens_per_second"] / other["tokens_per_second"]
            made.append(ours | {"other": other, "ratio": ratio})
    return made


def _ms(values: Record | None, share: str) -> str:
    return "" if values is None else f"{1e3 * values[share]:.1f}"


_CONVERSATION: Columns = {
    "model": "{kind}", "conversation": "{case}", "turns": "{third} {turns}", "tokens": "{tokens:,}",
    "new tokens": "{new:,}", "computed": "{computed:,}", "hits as without drafts": "{same_hits} of {turns}",
    "first token, s": "{first_token_seconds:.3f}", "prefill, s": "{prefill_seconds:.3f}",
    "its own forwards, s": "?{own_prefill_seconds:.3f}", "**ratio**": "?**{of_own:.2f}**",
    "decode, s": "{decode_seconds:.2f}", "tokens a pass": "{tokens_per_pass:.1f}",
    "repeated 8-grams": "{repeated_8grams:pct}", "ms/token": "{ms_per_token:.2f}",
    "plain": "{plain_ms_per_token:.2f}", "**speed-up**": "**{speedup:.2f}x**",
}  # fmt: skip
# What is timed beside questions alone.
_OWN = ("its own forwards, s", "**ratio**")
_AGENT = {"trace": "{part}"} | {name: cell for name, cell in _CONVERSATION.items() if name not in _OWN}
_CONVERSATION_NOTE = (
    "{hardware}, {dtype}, greedy, {reply} new tokens a turn, questions from the text {text}, torch "
    "{versions[torch]}; medians over the turns of each third (also of each turn's own ratios), sums of new "
    "and computed tokens. "
)
# Random models show what is kept; their times of decoding mean nothing.
_CACHES = {name: _CONVERSATION[name] for name in [*_CONVERSATION][: [*_CONVERSATION].index(_OWN[-1]) + 1]}
_CPU = CONVERSATION.format(machine="cpu")
_AGENT_NOTE = _CONVERSATION_NOTE.replace("questions from the text {text}", "the trace's own history")


def agent_rows(content: Record, table: str = "rows") -> list[Record]:
    """Returns the rows of all traces in a table of a conversation's file."""
    return [row for row in content.get(table, []) if row["part"] not in (QUESTIONS, OF_RANDOM)]


def _rows_of(part: str) -> Callable[[Record], list[Record]]:
    return lambda content: [row for row in content["rows"] if row["part"] == part]


def plot_turns(axis: Any, rows: list[Record]) -> None:
    """Plots ms a token by turn, ours and plain, and the seconds until the first token; of one model alone."""
    first = rows[0]
    turns = [row for row in rows if all(row[name] == first[name] for name in ("part", "kind", "case"))]
    numbers = [row["turn"] for row in turns]
    bars = axis.twinx()
    bars.bar(numbers, [row["first_token_seconds"] for row in turns], color="lightgrey", zorder=0)
    bars.set_ylabel("first token, s (bars)")
    axis.set_zorder(bars.get_zorder() + 1)
    axis.patch.set_visible(False)
    for name, label in (("ms_per_token", "ours"), ("plain_ms_per_token", "plain decoding")):
        axis.plot(numbers, [row[name] for row in turns], "o-", label=label)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="turn", ylabel="ms a token")
    axis.set_title(
        f"{first['kind']}, {first['part']} trace, {turns[-1]['prompt_tokens']:,} tokens", fontsize=9
    )
    axis.legend(fontsize=7)


PLOTS = {"conversation_cpu": (_CPU, lambda c: agent_rows(c, "turns"), (8, 3.5, 0), plot_turns)}


def _questions(machine: str) -> Table:
    file = CONVERSATION.format(machine=machine)
    make = listing(_CONVERSATION, _rows_of(QUESTIONS), noted(_CONVERSATION_NOTE, file), left=3)
    return Table(file, make, "python -m scripts.benchmarks conversation")


TABLES = {
    "conversation_cpu": _questions("cpu"),
    "conversation_h200": _questions("h200"),
    "conversation_caches_cpu": Table(
        _CPU,
        listing(_CACHES, _rows_of(OF_RANDOM), noted(_CONVERSATION_NOTE, _CPU), left=3),
        "python -m scripts.benchmarks conversation",
    ),
    "conversation_agent_cpu": Table(
        _CPU,
        listing(_AGENT, agent_rows, noted(_AGENT_NOTE, _CPU), left=4),
        "python -m scripts.benchmarks conversation --trace synthetic",
    ),
    "serving": Table(
        SERVING,
        listing(_CLIENTS, _by_cell, noted(_SERVING_NOTE, SERVING)),
        "python -m scripts.benchmarks serving",
    ),
    "requests": Table(FILE, listing(REQUESTS, caption=noted(_NOTE, FILE), left=2), _COMMAND),
    "requests_cpu": Table(
        CPU_FILE, listing(REQUESTS, caption=noted(_NOTE, CPU_FILE), left=2), f"{_COMMAND} --pair"
    ),
}
