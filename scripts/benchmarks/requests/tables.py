"""The table of docs/sessions.md from docs/results/requests_h200.json."""

from scripts.benchmarks.common.markdown import Columns, Table, listing, noted

FILE = "requests_h200.json"
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
TABLES = {
    "requests": Table(
        FILE, listing(REQUESTS, caption=noted(_NOTE, FILE), left=2), "python -m scripts.benchmarks requests"
    )
}
