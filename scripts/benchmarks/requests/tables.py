"""The tables of docs/sessions.md: whole requests, and saved sessions."""

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE, CPU_FILE, SAVED = "requests_h200.json", "requests_cpu.json", "saved_sessions.json"
REQUESTS: Columns = {
    "model": "{shape}", "request": "{turn}", "prompt": "{prompt_tokens:,}", "kept": "{reused_tokens:,}",
    "prefill, s": "{prefill_seconds:.2f}", "first token, s": "{first_token_seconds:.2f}",
    "of the cold one": "{of_cold_first_token:.1%}", "decode, s": "{decode_seconds:.2f}",
    "**whole, s**": "**{seconds:.2f}**", "plain, s": "{plain[seconds]:.2f}",
    "**speed-up**": "**{speedup:.2f}x**",
}  # fmt: skip
_ACCEPTANCE: Columns = {
    "retrieval accepts": "?{acceptance[retrieval]:.2f}", "target accepts": "?{acceptance[target]:.2f}",
    "tokens a pass": "?{tokens_per_pass:.1f}",
}  # fmt: skip
_COMMAND = "python -m scripts.benchmarks requests"
_NOTE = (
    "One {hardware}, {dtype}, greedy, {new_tokens} new tokens, text {text}, medians of {runs} runs, torch "
    "{versions[torch]}. "
)


def _columns(content: Record) -> Columns:
    """Files that are older than the columns of acceptance go without them."""
    return REQUESTS | _ACCEPTANCE if "tokens_per_pass" in content["rows"][0] else REQUESTS


def _table(file: str, command: str) -> Table:
    def make(content: Record) -> str | None:
        caption = noted(_NOTE, file)
        # Older files, all of GPUs, do not name it.
        return listing(_columns, caption=caption, left=2)({"dtype": "bf16"} | content)

    return Table(file, make, command)


_DISK: Columns = {
    "": "{what}", "MiB": lambda row: f"{row['bytes'] / 2**20:,.0f}", "s": "{seconds:.2f}",
    "the same bytes": "{raw}", "its s": "{raw_seconds:.2f}", "ratio": "**{ratio:.2f}**",
}  # fmt: skip
_DISK_NOTE = (
    "{tokens:,} tokens of Llama-3.1-8B's shape, cache on the CPU; {hardware}, medians of {runs} runs in turns, "
    "files flushed and dropped from the page cache. "
)
TABLES = {
    "requests": _table(FILE, _COMMAND),
    "requests_cpu": _table(CPU_FILE, f"{_COMMAND} --pair"),
    "saved_sessions": Table(
        SAVED, listing(_DISK, caption=noted(_DISK_NOTE, SAVED)), "python -m scripts.benchmarks saved_sessions"
    ),
}
