"""Tables of ``peers``: every engine and mode, and our default settings beside the fastest of the others."""

import statistics
from collections.abc import Callable, Sequence

from scripts.benchmarks.common.markdown import Caption, Columns, Record, Table, file_note, listing
from scripts.benchmarks.common.results import grouped

FILE = "peers_{machine}.jsonl"
CPU, GPU = FILE.format(machine="cpu"), FILE.format(machine="h200")
_COMMAND = "python -m scripts.benchmarks peers --models models --texts texts.json.xz"
_GPU_COMMAND = "python -m scripts.benchmarks peers --target TARGET --draft DRAFT --engines ours vllm"
OURS, DEFAULT, PLAIN = "ours", "default", "plain"
_NAMES = {OURS: "this project"}


def _name(row: Record) -> str:
    return f"{_NAMES.get(row['engine'], row['engine'])}, {row['mode']} ({row['format']})"


def medians(content: Record) -> list[Record]:
    """Returns medians over texts for each engine, format and mode by context, temperature, batch and
    number of new tokens.
    """
    names = ("part", "batch", "context", "new_tokens", "temperature", "bits", "engine", "format", "mode")
    found = grouped((row for row in content["rows"] if "missing" not in row), *names)
    made = []
    for key, same in found.items():
        times = [row["ms_per_token"] for row in same]
        figures = {
            name: statistics.median(known)
            if (known := [r[name] for r in same if r[name] is not None])
            else None
            for name in ("prefill_s", "cpu_ms_per_token", "tokens_per_pass", "repeated_8grams", "as_ours")
        }
        made.append({
            **dict(zip(names, key, strict=True)), **figures, "ms_per_token": statistics.median(times),
            "lowest": min(times), "highest": max(times), "texts": len(same),
        })  # fmt: skip
    return sorted(made, key=lambda row: tuple(row[name] for name in names))


def beside(content: Record) -> list[Record]:
    """Returns a row for each number of bits and place: ours, and the fastest mode of the other engines."""
    made = []
    places = "part", "batch", "context", "new_tokens", "temperature", "bits"
    for same in grouped(medians(content), *places).values():

        def fastest(wanted: Callable[[Record], bool], same: list[Record] = same) -> Record | None:
            return min(filter(wanted, same), key=lambda row: row["ms_per_token"], default=None)

        ours = fastest(lambda row: (row["engine"], row["mode"]) == (OURS, DEFAULT))
        plain = fastest(lambda row: (row["engine"], row["mode"]) == (OURS, PLAIN))
        other = fastest(lambda row: row["engine"] != OURS)
        if ours is None or other is None:
            continue
        made.append(ours | {
            "plain": plain, "other": other, "name": _name(other),
            "ratio": other["ms_per_token"] / ours["ms_per_token"],
        })  # fmt: skip
    return made


def _times(row: Record) -> str:
    """Returns the median over texts, and the fastest and the slowest text."""
    return f"{row['ms_per_token']:.1f} ({row['lowest']:.1f} to {row['highest']:.1f})"


BESIDE: Columns = {
    "prompt, tokens": "{context:,}", "T": "{temperature:g}", "bits": "{bits}",
    "ours, ms a token": "{ms_per_token:.1f}", "ours, plain": "?{plain[ms_per_token]:.1f}",
    "fastest other engine": "{name}", "its ms a token": "{other[ms_per_token]:.1f}",
    "**our speed to its**": "**{ratio:.2f}x**",
    "CPU ms a token: ours": "{cpu_ms_per_token:.1f}", "its": "{other[cpu_ms_per_token]:.1f}",
    "first token, s: ours": "{prefill_s:.2f}", "its, s": "{other[prefill_s]:.2f}",
}  # fmt: skip
BESIDE_GPU: Columns = {
    "model": "{part}", "prompt, tokens": "{context:,}", "new tokens": "{new_tokens}",
    "texts at once": "{batch}", "T": "{temperature:g}",
    "ours, ms a token": _times, "ours, plain": "?{plain[ms_per_token]:.1f}",
    "fastest other engine": "{name}", "its ms a token": "{other[ms_per_token]:.1f}",
    "**our speed to its**": "**{ratio:.1f}x**",
    "first token, s: ours": "{prefill_s:.2f}", "its, s": "{other[prefill_s]:.2f}",
    "repeated 8-grams": "{repeated_8grams:pct}", "its": "{other[repeated_8grams]:pct}",
}  # fmt: skip
EVERY: Columns = {
    "engine, mode (weights)": _name, "bits": "{bits}", "prompt, tokens": "{context:,}",
    "T": "{temperature:g}", "batch": "{batch}", "ms a token": _times,
    "CPU ms a token": "{cpu_ms_per_token:.1f}",
    "first token, s": "{prefill_s:.2f}", "tokens a pass": "?{tokens_per_pass:.1f}",
    "repeated 8-grams": "{repeated_8grams:pct}", "greedy tokens as our plain ones": "?{as_ours:.0f}",
}  # fmt: skip


EVERY_GPU: Columns = {"model": "{part}", "new tokens": "{new_tokens}"} | {
    name: cell for name, cell in EVERY.items() if name not in ("bits", "CPU ms a token")
}


def _captioned(file: str, missing: bool) -> Caption:
    """Returns a function that makes the caption: machine, versions, and which engines are missing."""
    return lambda content, rows: _caption(file, content, rows, missing)


def _caption(file: str, content: Record, rows: Sequence[Record], missing: bool) -> str:
    told = []
    for name in dict.fromkeys(row["part"] for row in rows):
        part = content["parts"][name]
        versions: dict[str, str] = {}
        for row in content["rows"]:
            if row["part"] == name:
                versions |= row.get("versions", {})
        versions.pop("python", None)
        shown = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
        threads = f", {part['settings']['threads']} threads" if file == CPU else ""
        told.append(f"{name}: {part['hardware']}{threads}, {shown}.")
        absent = [row for row in content["rows"] if row["part"] == name and "missing" in row]
        if missing and absent:
            told += [f"Not measured: {_name(row)}{_where(row)}, because {row['missing']}." for row in absent]
    texts = ", ".join(
        f"{texts} at {context:,} tokens"
        for context, texts in dict.fromkeys((row["context"], row["texts"]) for row in rows)
    )
    new = " and ".join(str(count) for count in sorted({row["new_tokens"] for row in rows}))
    told.append(
        f"{new} new tokens, medians over texts ({texts}); the first token comes after the "
        "prompt was read, and ms a token is the time between it and the last one."
    )
    if file == CPU:
        shares = [row["other_programs"] for row in content["rows"] if "missing" not in row]
        told.append(
            f"Other programs used {statistics.median(shares):.0%} of the CPUs' time (median), at most "
            f"{max(shares):.0%}."
        )
    return " ".join([*told, file_note(file, content["parts"])])


def _where(row: Record) -> str:
    return f", {row['context']:,} tokens" if "context" in row else ""


TABLES = {
    "peers_cpu": Table(CPU, listing(BESIDE, beside, _captioned(CPU, False), left=0), _COMMAND),
    "peers_cpu_all": Table(CPU, listing(EVERY, medians, _captioned(CPU, True)), _COMMAND),
    "peers_gpu": Table(GPU, listing(BESIDE_GPU, beside, _captioned(GPU, False)), _GPU_COMMAND),
    "peers_gpu_all": Table(GPU, listing(EVERY_GPU, medians, _captioned(GPU, True), left=2), _GPU_COMMAND),
}
