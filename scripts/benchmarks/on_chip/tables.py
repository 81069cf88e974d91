"""Tables of docs/measurements.md from docs/results/on_chip_h200.jsonl."""

from collections.abc import Sequence
from functools import partial

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Rows,
    Table,
    listing,
    noted,
    origin,
    rows_of,
    vocabulary_note,
)
from scripts.benchmarks.common.results import PLAIN

FILE, PREFILL_FILE = "on_chip_h200.jsonl", "prefill_h200.jsonl"
HEADLINES = ("7b", "8b", "batch")
# Speed-ups that TriForce (arXiv 2404.11912) reports for Llama-2-7B on an A100, by batch,
# context and temperature.
TRIFORCE = {(1, 122_880, 0.0): 2.31, (1, 122_880, 0.6): 2.19, (1, 122_880, 1.0): 2.08, (6, 19_456, 0.0): 1.90}
PREFILL: Columns = {
    "model": "{shape}", "context": "{context:,}", "chunk": "{chunk:,}",
    "attention": lambda row: prefill_path(row),
    "layers": lambda row: "kernels" if row.get("kernels") else "transformers'",
    "**seconds**": "**{seconds:.2f}**", "TFLOP/s": "{tflops:.0f}", "of the product": "?{roofline_share:pct}",
    "in linears": "?{parts[linears]:.2f}", "in attention": "?{parts[attention]:.2f}",
    "rest": "?{parts[rest]:.2f}",
}  # fmt: skip
_CUDNN, _FLASH_ATTN_4 = "cuDNN before the chunk, without a mask", "flash-attn 4, causal"
PREFILL_PATHS = {
    "engine": _CUDNN, "cudnn": _CUDNN, "flash-attn-4": _FLASH_ATTN_4,
    "flash": "torch's flash attention, causal",
}  # fmt: skip
ALONE: Columns = {
    "model": "{shape}", "heads": "{heads[0]}/{heads[1]} x {heads[2]}", "queries": "{queries:,}",
    "positions before them": "{before:,}", "attention": lambda row: PREFILL_PATHS[row["path"]],
    "**TFLOP/s**": "**{tflops:.0f}**", "ms": "{ms:.2f}", "first call, s": "{first_seconds:.1f}",
    "error": "{error:.1e}",
}  # fmt: skip
STAGES = {
    "draft": "0: draft grows a tree",
    "retrieval_refresh": "1: first pass, chooses chunks",
    "retrieval": "1: further passes",
    "target": "2: target on the full cache",
}
HEADLINE: Columns = {
    "model": "{shape}", "prompts": "{prompts} x {batch} x {context:,}", "T": "{temperature:g}",
    "**ms/token**": "**{ms_per_token:.2f}**",
    "our plain decoding (of its roofline)": "?{plain[ms_per_token]:.2f} ({plain[share]:pct})",
    "transformers static": "?{baselines[transformers-static][ms_per_token]:.1f}",
    "**speed-up**": "?**{speedup:.2f}x**", "TriForce, A100": "?{published:.2f}x",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
LEVELS: Columns = {
    "": "{where}", "level": "{level}", "runs a pass": "?{runs:.2f}", "ms a run": "{ms:.2f}",
    "roofline, ms": "?{roof_ms:.2f}", "of its roofline": "?{of_roof:pct}",
    "share of the pass": "?{share:pct}",
}  # fmt: skip
ACCEPTANCE: Columns = {
    "model": "{shape}", "batch x context": "{batch} x {context:,}", "T": "{temperature:g}",
    "retrieval accepts": "?{acceptance[retrieval]:.2f}",
    "tokens a pass of level 1": "?{mean_accepted_length[retrieval]:.2f}",
    "target accepts": "?{acceptance[target]:.2f}",
    "tokens a pass of level 2": "?{mean_accepted_length[target]:.2f}",
    "passes of level 1 a pass of level 2": "{rounds_per_pass:.2f}",
    "greedy tokens compared": "?{exact[compared]:,}", "ties": "?{exact[ties]:,}",
    "failures": "?{exact[failures]:,}",
}  # fmt: skip
COSTS: Columns = {
    "model": "{shape}", "batch x context": "{batch} x {context:,}", "prefill, s": "{prefill_seconds:.1f}",
    "compile and capture, s": "{capture_seconds:.0f}", "peak, GiB": "{peak_gib:.0f}",
    "level 1, bits": "{options[retrieval_weight_bits]}",
}  # fmt: skip
LENGTHS: Columns = {
    "context": "{context:,}", "T": "{temperature:g}", "budget": "{options[budget]:,}",
    "ms/token": "{ms_per_token:.2f}", "plain": "?{baseline_ms_per_token:.2f}", "speed-up": "?{speedup:.2f}x",
    "tokens a pass": "{tokens_per_pass:.2f}", "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
OUTPUTS: Columns = {
    "new tokens": "{new_tokens:,}", "T": "{temperature:g}", "ms/token": "{ms_per_token:.2f}",
    "speed-up": "?{speedup:.2f}x", "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip


def prefill_path(row: Record) -> str:
    """Returns the name of the implementation of attention, and for the engine the one that it chose."""
    choices = row.get("choices", {})
    if row["path"] != "engine" or not choices.get("flash_attn_4"):
        return PREFILL_PATHS[row["path"]]
    return f"{_FLASH_ATTN_4}, for {choices['flash_attn_4']} of {choices['compared']} kinds of calls"


def _alone(content: Record) -> list[Record]:
    """Returns the measurements of attention alone; the engine's only if no other path equals it."""
    rows = [row | {"ms": 1e3 * row["seconds"]} for row in content.get("attention", ())]
    named = {row["path"] for row in rows} - {"engine"}
    return [row for row in rows if row["path"] != "engine" or "cudnn" not in named]


def setting(change: Record) -> str:
    return ", ".join(f"{k}={v}" for k, v in change.items()) or "nothing"


def _rows(*parts: str, order: tuple[str, ...] = ()) -> Rows:
    """Returns a function that selects the rows of these parts, sorted by the keys in ``order``."""

    def find(content: Record) -> list[Record]:
        found = []
        for row in rows_of(content, *parts):
            spent = {name: stage["runs"] * stage["ms"] for name, stage in row["stages"].items()}
            spent["retrieval"] = spent.pop("retrieval_refresh", 0.0) + spent.pop("retrieval", 0.0)
            more = {"spent": spent, "changed": setting(row["setting"])}
            more["options"] = content["parts"][row["part"]]["settings"]["options"] | row["setting"]
            if plain := row["baselines"].get(PLAIN):
                more["plain"] = plain | {"share": row["roof_ms"] / plain["ms_per_token"]}
            if "llama-2-7b" in row["shape"]:
                more["published"] = TRIFORCE.get((row["batch"], row["context"], row["temperature"]))
            found.append(row | more)
        return sorted(found, key=lambda row: [row[key] for key in order])

    return find


def _levels(content: Record) -> list[Record]:
    """Returns the time of each stage of a pass and its roofline."""
    lines: list[Record] = []
    for row in rows_of(content, *HEADLINES):
        where = f"{row['shape']}, {row['batch']} x {row['context']:,}, T={row['temperature']:g}"
        for name in (name for name in STAGES if name in row["stages"]):
            stage = row["stages"][name]
            share = stage["runs"] * stage["ms"] / row["pass_ms"]
            shares = {"of_roof": stage["roof_ms"] / stage["ms"], "share": share}
            lines.append({"where": where, "level": STAGES[name], **stage, **shares})
            where = ""
        lines.append({"where": "", "level": "a pass, the host's part included", "ms": row["pass_ms"]})
    return lines


def _costs(content: Record) -> list[Record]:
    """Returns the costs that occur once: prefill, capture and memory."""
    rows = _rows(*HEADLINES)(content)
    return list({(r["shape"], r["batch"], r["context"]): r for r in rows}.values())


def _bandwidth(part: Record) -> str:
    return f"read bandwidth {part['read_bandwidth'] / 1e12:.2f} TB/s measured in the same run"


_origin = partial(origin, file=FILE, measured=_bandwidth, note="Not measured in")


def texts(content: Record) -> str | None:
    """Returns the names of the prompts as a list."""
    parts = [content["parts"][p] for p in HEADLINES if p in content["parts"]]
    return "".join(f"- {name}\n" for name in dict.fromkeys(n for p in parts for n in p["sources"])) or None


_MAKERS = {
    "headline": ("7b", listing(HEADLINE, _rows(*HEADLINES), _origin)),
    "levels": ("7b", listing(LEVELS, _levels)),
    "acceptance": ("7b", listing(ACCEPTANCE, _rows(*HEADLINES))),
    "costs": ("7b", listing(COSTS, _costs)),
    "lengths": ("lengths", listing(LENGTHS, _rows("lengths", order=("context", "temperature")), _origin)),
    "outputs": ("outputs", listing(OUTPUTS, _rows("outputs", order=("temperature", "new_tokens")), _origin)),
    "texts": ("7b", texts),
}
COMMAND = "python -m scripts.benchmarks on_chip --part"
_PREFILL_NOTE = (
    "One {hardware}, bf16, batch 1, torch {versions[torch]}; a product of 8192 x 8192 matrices has "
    "{matmul_tflops:.0f} TFLOP/s in the same run. "
)
_ALONE_NOTE = (
    "One layer's attention, {hardware}, bf16, torch {versions[torch]}; errors are relative, against fp32. "
    "First calls contain plans and compilation. "
)


def _prefill_caption(content: Record, rows: Sequence[Record]) -> str:
    entries = "; ".join({f"{row['shape']}: {vocabulary_note(row)}": None for row in rows})
    return noted(f"{_PREFILL_NOTE}{entries}. ", PREFILL_FILE)(content, rows)


TABLES = {
    "prefill": Table(
        PREFILL_FILE,
        listing(PREFILL, caption=_prefill_caption),
        "python -m scripts.benchmarks prefill",
    ),
    "prefill_attention": Table(
        PREFILL_FILE,
        listing(ALONE, _alone, noted(_ALONE_NOTE, PREFILL_FILE), left=2),
        "python -m scripts.benchmarks prefill",
    ),
}
TABLES |= {
    f"on_chip_{name}": Table(FILE, make, f"{COMMAND} {part}") for name, (part, make) in _MAKERS.items()
}
