"""Write the tables of README.md and docs/ from the results files, so that no figure is typed by hand.

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import json
import re
from collections.abc import Sequence

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.cards import tables as cards
from scripts.benchmarks.common.markdown import (
    OLDER,
    Columns,
    Record,
    Table,
    file_note,
    grid,
    listing,
    rows_of,
)
from scripts.benchmarks.common.results import PAIR_VOCABULARY
from scripts.benchmarks.cpu import tables as cpu
from scripts.benchmarks.exact import tables as exact
from scripts.benchmarks.linear import tables as linear
from scripts.benchmarks.offload import tables as offload
from scripts.benchmarks.on_chip import tables as on_chip
from scripts.benchmarks.requests import tables as requests
from scripts.benchmarks.retrieval import tables as retrieval
from scripts.benchmarks.rope import tables as rope
from scripts.benchmarks.texts import tables as texts
from scripts.benchmarks.verification import tables as verification
from scripts.benchmarks.workloads import tables as workloads
from scripts.checks.models import table as models_table
from scripts.train_pair.heads import results as heads
from scripts.train_pair.kinds import results as kinds
from triforce_tree.eval.report.code_digest import ROOT, mark

RESULTS = ROOT / "docs" / "results"
# The table on README's first screen. Greedy texts are left out: those of a small model repeat themselves,
# which flatters every drafter.
FRONT: Columns = {
    "card": "{card}", "size of model": "{size}", "its vocabulary": "{entries:,}", "prompt, tokens": "{where}",
    "text": "{text}", "T": "{temperature:g}", "ms a token": "**{ms_per_token:.1f}**",
    "plain decoding": "{plain_ms:,.1f}", "speed-up": "**{gain:.1f}x**{spread}",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
REQUESTS: Columns = {
    "card": "{card}", "size of model": "{size}", "prompt, tokens": "{where}", "text": "{text}",
    "T": "{temperature:g}", "first answer, s": "**{cold:.1f}**", "plain, s": "{cold_plain:.1f}",
    "speed-up": "**{cold_gain:.1f}x**", "next answer, s": "**{next:.1f}**",
    "its plain, s": "{next_plain:.1f}", "its speed-up": "**{gain:.1f}x**",
}  # fmt: skip
_SIZES = {
    "llama-2-7b inflated": "Llama-2-7B", "llama-3.1-8b inflated": "Llama-3.1-8B",
    "llama-2-13b inflated": "Llama-2-13B", "embedded pair": "the embedded pair",
}  # fmt: skip
_OWN_KIND = "documentation"
# New tokens of a whole request.
_ANSWER = 256
# (part, batch, context) of the file of figures with all on the card.
_ON_CARD = (
    ("lengths", 1, 4_096), ("lengths", 1, 16_384), ("lengths", 1, 32_768), ("7b", 1, 122_880),
    ("8b", 1, 122_880), ("batch", 6, 19_456),
)  # fmt: skip
# Parts of the file of offloaded figures: what is not on the card.
_OFFLOADED = {
    "host-attention-8b": "a part of the cache in host memory, read there by the CPU",
    "host-attention": "most of the cache in host memory, read there by the CPU",
    "13b": "weights and cache in host memory, copied to the card in each pass",
}
NOTHING: Record = {"rows": [], "parts": {}}
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def held(file: str) -> Record | None:
    """The content of a results file, where there is one."""
    path = RESULTS / file
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def front_rows(content: Record) -> list[Record]:
    """What three levels bring; ``origin`` of a row is its file, part and header."""
    rows = _over_texts(texts.ANY_TEXT)
    for part, batch, context in _ON_CARD:
        where = f"{batch} prompts of {context:,}" if batch > 1 else f"{context:,}"
        found = [r for r in rows_of(content, part) if (r["batch"], r["context"]) == (batch, context)]
        header = content["parts"].get(part, {})
        place = {"where": where, "card": header.get("hardware"), "text": _OWN_KIND}
        rows += [r | place | {"origin": (on_chip.FILE, part, header)} for r in _sampled(found)]
    offloaded = held(offload.FILE) or NOTHING
    for part, what in _OFFLOADED.items():
        for r in _sampled(rows_of(offloaded, part)):
            header = offloaded["parts"][part]
            limited = f"{header['hardware']} limited to {r['gpu_memory_cap_gib']:g} GiB"
            place = {"where": f"{r['context']:,}", "card": f"{limited}: {what}", "text": _OWN_KIND}
            rows.append(r | place | {"origin": (offload.FILE, part, header)})
    rows += _over_texts(texts.NEVER_SLOWER_CPU, "none: ") or _on_two_cores()
    for r in rows:
        r["size"] = _SIZES[r["shape"]]
        r["plain_ms"] = r.get("attended_baseline_ms_per_token", r["baseline_ms_per_token"])
        r["gain"] = r.get("speedup_to_fastest_baseline", r["speedup"])
        r["spread"] = f" ({r['lowest']:.1f}x to {r['highest']:.1f}x)" if "lowest" in r else ""
        r["entries"] = r["origin"][2]["settings"].get("vocabulary") or PAIR_VOCABULARY
    return rows


def _over_texts(file: str, card: str = "") -> list[Record]:
    """Medians over texts of all kinds, with default settings; of the longest prompts.

    Args:
        card: what stands before the machine's name.
    """
    content = held(file) or NOTHING
    longest = max((r["context"] for r in content["rows"]), default=0)
    return [
        r | {
            "shape": r["model"], "where": f"{r['context']:,}", "card": card + _limited(r),
            "speedup": r["median"],
            "text": _kinds(r), "baseline_ms_per_token": r["plain_ms_per_token"],
            "origin": (file, r["part"], content["parts"][r["part"]]),
        }
        for r in texts.summary(content)
        if r["temperature"] > 0 and r["context"] == longest
    ]  # fmt: skip


def _limited(r: Record) -> str:
    """The card, and which of its memory may be used."""
    limit = r["settings"].get("gpu_memory", "").replace("GiB", " GiB")
    return r["machine"] + (f" limited to {limit}: the rest in host memory" if limit else "")


def _kinds(r: Record) -> str:
    texts, kinds = r["texts"], r["kinds"]
    return f"{kinds} kinds" if texts == kinds else f"{texts} texts of {kinds} kinds"


def _sampled(rows: Sequence[Record]) -> list[Record]:
    return sorted((r for r in rows if r["temperature"] > 0), key=lambda r: r["temperature"])


def _on_two_cores() -> list[Record]:
    """The embedded pair itself, beside this engine's own plain decoding."""
    content = held(cpu.SPEED) or NOTHING
    by_method = {r["method"]: r for r in _sampled(content["rows"])}
    if not {"triforce-3-level", "triforce-autoregressive"} <= by_method.keys():
        return []
    ours, plain = by_method["triforce-3-level"], by_method["triforce-autoregressive"]["ms_per_token"]
    place = {"card": f"none: {content['hardware']}", "shape": "embedded pair", "text": _OWN_KIND}
    figures = {"baseline_ms_per_token": plain, "speedup": plain / ours["ms_per_token"]}
    return [ours | place | figures | {"where": f"{ours['context']:,}", "origin": (cpu.SPEED, "", content)}]


def request_rows(content: Record) -> list[Record]:
    """Seconds until a first and a next answer about one text: the first row of each size in ``front``.

    Args:
        content: of the file of prefills on the same card.
    """
    reading: dict[tuple[str, str], float] = {}
    for row in content["rows"]:
        if row["path"] == "engine" and row["kernels"]:
            key = f"{row['shape']} inflated", f"{row['context']:,}"
            reading[key] = min(row["seconds"], reading.get(key, row["seconds"]))
    found: dict[str, Record] = {}
    for r in front_rows(held(on_chip.FILE) or NOTHING):
        seconds = reading.get((r["shape"], r["where"]))
        if seconds is not None and r["card"] == content["hardware"]:
            ours, plain = (_ANSWER * ms / 1e3 for ms in (r["ms_per_token"], r["plain_ms"]))
            cold = {"cold": seconds + ours, "cold_plain": seconds + plain}
            gain = {"cold_gain": cold["cold_plain"] / cold["cold"]}
            found.setdefault(r["shape"], r | cold | gain | {"next": ours, "next_plain": plain})
    return list(found.values())


def request_note(content: Record, rows: Sequence[Record]) -> str:
    origins = {r["origin"][0] for r in rows}
    others = ", ".join(f"`docs/results/{name}`" for name in sorted(origins))
    return (
        f"Sums of seconds for the prompt and {_ANSWER} times the milliseconds above ({others}). "
        f"{file_note(on_chip.PREFILL_FILE, {'': content})}"
    )


def front_note(content: Record, rows: list[Record]) -> str:
    files: dict[str, dict[str, Record]] = {}
    for r in rows:
        file, part, header = r["origin"]
        files.setdefault(file, {})[part] = header
    named = (f"`docs/results/{file}`{OLDER if mark(headers) else ''}" for file, headers in files.items())
    return f"From {', '.join(named)}.\n"


def code_states() -> dict[str, str]:
    """By results file: commits of the figures that are not known to be of today's code."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        content = held(path.name) or {}
        if told := mark(content.get("parts") or content.get("evaluated") or {"": content}):
            found[path.name] = told[2:-1]
    return found


def which_code(content: Record) -> str:
    """The table of files with older figures; the others hold figures of today's code."""
    return grid(["file", "older figures in it"], [[f"`{f}`", told] for f, told in code_states().items()], 2)


front = listing(FRONT, front_rows, front_note, left=5)
TABLES = {
    "front": Table(on_chip.FILE, front, f"{on_chip.COMMAND} 7b"),
    "front_requests": Table(
        on_chip.PREFILL_FILE, listing(REQUESTS, request_rows, request_note, left=4),
        "python -m scripts.benchmarks prefill",
    ),
    "which_code": Table(on_chip.FILE, which_code, f"{on_chip.COMMAND} 7b"),
    **on_chip.TABLES, **offload.TABLES, **attention.TABLES, **linear.TABLES, **cpu.TABLES,
    **models_table.TABLES, **texts.TABLES, **retrieval.TABLES, **verification.TABLES,
    **requests.TABLES, **workloads.TABLES, **heads.TABLES, **cards.TABLES, **exact.TABLES,
    **rope.TABLES, **kinds.TABLES,
}  # fmt: skip


def text_of(name: str) -> str:
    """A table, or the command that would make its figures."""
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    shown = TABLES[name]
    if (content := held(shown.file)) is None:
        return f"Not measured yet: `{shown.command}` writes `docs/results/{shown.file}`.\n"
    return shown.make(content) or f"Not measured yet: `{shown.command}`.\n"


def filled(text: str) -> str:
    return MARKED.sub(lambda m: m[1] + text_of(m[2]) + m[3], text)


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tables", description=__doc__.partition("\n")[0]
    )
    made.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is old")
    made.add_argument("--plots", action="store_true", help="draw the plots as well, which needs matplotlib")
    args = made.parse_args(words)
    if args.plots:
        from scripts.benchmarks import plots

        for path in plots.draw(RESULTS):
            print(f"{path.relative_to(ROOT)}: written")
    old = False
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (fresh := filled(text)) != text:
            old = True
            if not args.check:
                path.write_text(fresh, encoding="utf-8")
            done = "out of date; run python -m scripts.benchmarks tables" if args.check else "written"
            print(f"{path.relative_to(ROOT)}: {done}")
    # Files whose figures are older than the code under them.
    for name, told in code_states().items():
        print(f"docs/results/{name}: {told}")
    return int(args.check and old)
