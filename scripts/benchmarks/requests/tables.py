"""Tables of docs/sessions.md: whole requests, and keys and values that prompts share."""

from collections.abc import Iterable
from functools import partial

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE = "requests_h200.json"
SHARED, CLIENTS = "shared_prefix_{machine}.json", "clients_{machine}.json"
REQUESTS: Columns = {
    "model": "{shape}", "request": "{turn}", "prompt": "{prompt_tokens:,}", "kept": "{reused_tokens:,}",
    "prefill, s": "{prefill_seconds:.2f}", "first token, s": "{first_token_seconds:.2f}",
    "of the cold one": "{of_cold_first_token:.1%}", "decode, s": "{decode_seconds:.2f}",
    "**whole, s**": "**{seconds:.2f}**", "plain, s": "{plain[seconds]:.2f}",
    "**speed-up**": "**{speedup:.2f}x**",
}  # fmt: skip
_NOTE = (
    "One {hardware}, bf16, greedy, {new_tokens} new tokens, text {text}, medians of {runs} runs, torch "
    "{versions[torch]}. "
)
SHARED_PREFIX: Columns = {
    "questions about": "{case}", "document, tokens": "{context:,}", "levels": "{levels}",
    "KV slots": "{slots:,}", "those of copies": "{copied[slots]:,}",
    "**of them**": "**{slots_of_copies:pct}**",
    "tokens prefilled": "{computed:,}", "with copies": "{copied[computed]:,}",
    "prefill, time of copies": "{of_copies[prefill_seconds]:.2f}",
    "**pass, time of copies**": "**{of_copies[ms_per_step]:.2f}**",
    "same tokens": "{same_tokens:,} of {all_tokens:,}",
}  # fmt: skip
_SHARED_NOTE = (
    "{shape}, {hardware}, {threads} threads, torch {versions[torch]}; {questions} questions at a time, "
    "greedy, {new_tokens} new tokens each, text {text}; medians of {runs} ratios to a run with copies, "
    "by seconds of {seconds_of}. "
)
JOINING: Columns = {
    "document, tokens": "{context:,}", "levels": "{levels}", "together": "{together}",
    "KV slots": "{slots:,}", "those of copies": "{copied[slots]:,}", "tokens in them": "{stored:,}",
    "those in copies": "{copied[stored]:,}", "**of them**": "**{stored_of_copies:pct}**",
    "**all answers, time of copies**": "**{of_copies[seconds]:.2f}**",
    "same tokens": "{same_tokens:,} of {all_tokens:,}",
}  # fmt: skip
_CLIENTS_NOTE = _SHARED_NOTE.replace("{questions} questions at a time", "{clients} clients")


def _beside_copies(content: Record, counts: Iterable[str]) -> list[Record]:
    """A line for each run that stores prefixes once, with the row of its copies."""
    once, copies = content["rows"][::2], content["rows"][1::2]
    return [
        {**row, "copied": other, **{f"{name}_of_copies": row[name] / other[name] for name in counts}}
        for row, other in zip(once, copies, strict=True)
    ]


TABLES = {
    "requests": Table(
        FILE, listing(REQUESTS, caption=noted(_NOTE, FILE), left=2), "python -m scripts.benchmarks requests"
    )
}
for _machine, _more in (("h200", ""), ("cpu", " --tiny --out docs/results")):
    _shared, _clients = (file.format(machine=_machine) for file in (SHARED, CLIENTS))
    TABLES[f"shared_prefix_{_machine}"] = Table(
        _shared,
        listing(SHARED_PREFIX, partial(_beside_copies, counts=["slots"]), noted(_SHARED_NOTE, _shared)),
        f"python -m scripts.benchmarks shared_prefix{_more}",
    )
    TABLES[f"clients_{_machine}"] = Table(
        _clients,
        listing(JOINING, partial(_beside_copies, counts=["slots", "stored"]), noted(_CLIENTS_NOTE, _clients)),
        f"python -m scripts.benchmarks clients{_more}",
    )
