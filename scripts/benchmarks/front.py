"""Speed by card, model and length, and README's table: cases of users, beside what they would run instead.

Speeds by card are medians over texts of all kinds, with default settings. Greedy texts are left out: those of
a small model repeat themselves, which flatters every drafter.
"""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, file_named, listing
from scripts.benchmarks.common.results import RESULTS, content_at
from scripts.benchmarks.peers import tables as peers
from scripts.benchmarks.requests import tables as requests
from scripts.benchmarks.texts import tables as texts
from scripts.benchmarks.texts.real_model import PAIR_SHAPE

SPEEDS: Columns = {
    "card": "{card}", "size of model": "{size}", "prompt, tokens": "{context:,}", "texts": "{what}",
    "T": "{temperature:g}", "ms a token": "**{ms_per_token:.1f}**",
    "plain decoding": "{plain_ms_per_token:,.1f}",
    "speed-up": "**{median:.1f}x** ({lowest:.1f}x to {highest:.1f}x)",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
FRONT: Columns = {
    "case": "{case}", "prompt, tokens": "{prompt}", "beside": "{beside}", "its speed": "{theirs}",
    "ours": "**{ours}**", "ours to its": "**{ratio}**",
}  # fmt: skip
# README's loads of a server: clients, tokens of a prompt and of an answer.
_LOADS = [(1, 65_536, 512), (8, 16_384, 2048), (32, 16_384, 512)]
# Its lone text beside our plain decoding: what the card begins with, a size, a length.
_LONE = ("NVIDIA H200 limited", "Llama-2-7B", 122_880)
# Bits and temperature of its lone texts beside other engines.
_ON_GPU, _ON_CPU = (16, 0.6), (4, 0.8)
_SERVERS = {"vllm": "vLLM", "vllm-ngram": "vLLM, n-grams"}
_SIZES = {
    "llama-2-7b inflated": "Llama-2-7B", "llama-3.1-8b inflated": "Llama-3.1-8B",
    "llama-2-13b inflated": "Llama-2-13B", "embedded pair": "the embedded pair",
    "SmolLM2-135M-Instruct.Q4_1, llama-3.1-8b inflated": "SmolLM2-135M, widened to Llama-3.1-8B",
    "SmolLM2-135M-Instruct.Q4_1, YaRN to 32,768, llama-3.1-8b inflated":
        "SmolLM2-135M with YaRN, widened to Llama-3.1-8B",
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M, with a draft",
    "SmolLM2-135M-Instruct.Q4_1, YaRN to 32,768": "SmolLM2-135M with YaRN, with a draft",
    "SmolLM2-135M-Instruct.Q4_1, no draft": "SmolLM2-135M, without a draft",
}  # fmt: skip
# Shorter prompts have one temperature in the table, and these lengths.
_TEMPERATURE = 0.6
_CONTEXTS, _CPU_CONTEXTS = (4096, 16_384, 65_536), (4096, 16_384)


def speed_rows(any_text: Record) -> list[Record]:
    """Returns medians over texts by card, size and length; ``origin`` is file, part and header."""
    long = _sampled(texts.ANY_TEXT, any_text)
    sizes = {r["model"] for r in long}
    grid = _sampled(texts.NEVER_SLOWER, content_at(RESULTS / texts.NEVER_SLOWER))
    shorter = [
        r for r in grid
        if r["model"] in sizes and r["context"] in _CONTEXTS and r["temperature"] == _TEMPERATURE
    ]  # fmt: skip
    real = _others(_sampled(texts.REAL_MODEL, content_at(RESULTS / texts.REAL_MODEL)))
    rows = sorted([*shorter, *long, *real], key=_place)
    on_cpu = _sampled(texts.NEVER_SLOWER_CPU, content_at(RESULTS / texts.NEVER_SLOWER_CPU))
    on_cpu = [r for r in on_cpu if r["context"] in _CPU_CONTEXTS]
    on_cpu += _others(_sampled(texts.REAL_MODEL_CPU, content_at(RESULTS / texts.REAL_MODEL_CPU)))
    return rows + [r | {"card": f"none: {r['card']}"} for r in on_cpu]


def front_rows(any_text: Record) -> list[Record]:
    """Returns README's rows: loads of a server, and lone texts on a GPU, with offloading and on a CPU."""
    on_cpu = content_at(RESULTS / peers.CPU)
    cores = next(part["settings"]["threads"] for part in on_cpu["parts"].values())
    return [
        *_loads(content_at(RESULTS / requests.SERVING)),
        *_beside_engines(peers.GPU, "Llama-3.1-8B", *_ON_GPU),
        *_lone(any_text),
        *_beside_engines(peers.CPU, f"SmolLM2-135M in {_ON_CPU[0]} bits, {cores} CPU cores", *_ON_CPU),
    ]


def _loads(content: Record) -> list[Record]:
    """Returns loads of a server beside the fastest other one."""
    found = {(r["clients"], r["prompt_tokens"], r["new_tokens"]): r for r in requests.beside(content)}
    rows = []
    for clients, prompt, new in _LOADS:
        if r := found.get((clients, prompt, new)):
            header, other = content["parts"][r["part"]], r["other"]
            size = _SIZES[f"{header['settings']['shape']} inflated"]
            users = f"{clients} user{'s' * (clients > 1)}"
            rows.append({
                "case": f"a server of {size}, {users}, answers of {new:,} tokens", "prompt": f"{prompt:,}",
                "beside": _SERVERS.get(other["part"], other["part"]), "ratio": f"{r['ratio']:.2f}x",
                "theirs": f"{other['tokens_per_second']:,.0f} tokens/s",
                "ours": f"{r['tokens_per_second']:,.0f} tokens/s",
                "origin": (requests.SERVING, r["part"], header),
            })  # fmt: skip
    return rows


def _lone(any_text: Record) -> list[Record]:
    """Returns a lone text beside plain decoding, at the lowest temperature above 0."""
    card, size, context = _LONE
    same = [
        r for r in speed_rows(any_text)
        if (r["size"], r["context"]) == (size, context) and r["card"].startswith(card)
    ]  # fmt: skip
    limit = "".join(r["card"].partition(" limited to ")[2] for r in same[:1]).replace(":", " of the card,")
    return [
        r | {
            "case": f"one text, {size}, {limit}",
            "prompt": f"{context:,}", "beside": "our own plain decoding",
            "theirs": f"{r['plain_ms_per_token']:,.1f} ms", "ours": f"{r['ms_per_token']:.1f} ms",
            "ratio": f"{r['median']:.1f}x ({r['lowest']:.1f}x to {r['highest']:.1f}x)",
        }
        for r in sorted(same, key=lambda r: float(r["temperature"]))[:1]
    ]  # fmt: skip


def _beside_engines(file: str, models: str, bits: int, temperature: float) -> list[Record]:
    """Returns a row with all lengths of a prompt of one text, beside the fastest other engine."""
    content = content_at(RESULTS / file)
    rows = [
        r for r in peers.beside(content)
        if (r["batch"], r["bits"], r["temperature"]) == (1, bits, temperature)
    ]  # fmt: skip
    if not rows:
        return []

    def each(template: str) -> str:
        return ", ".join(template.format(**r) for r in rows)

    engines = dict.fromkeys(_SERVERS.get(r["other"]["engine"], r["other"]["engine"]) for r in rows)
    return [{
        "case": f"one text, {models}", "prompt": each("{context:,}"), "beside": ", ".join(engines),
        "theirs": each("{other[ms_per_token]:.1f}") + " ms", "ours": each("{ms_per_token:.1f}") + " ms",
        "ratio": each("{ratio:.2f}x"), "lengths": each("{texts}"), "temperature": temperature,
        "origin": (file, rows[0]["part"], content["parts"][rows[0]["part"]]),
    }]  # fmt: skip


def front_note(any_text: Record, rows: Sequence[Record]) -> str:
    """Returns what is compared, on which hardware, where ours is slower, and the files of the rows."""
    loads = [r["ratio"] for r in requests.beside(content_at(RESULTS / requests.SERVING))]
    beside = peers.beside(content_at(RESULTS / peers.CPU))
    on_cpu = [r["ratio"] for r in beside if r["other"]["engine"] == "llama.cpp"]
    lengths = " and ".join(r["lengths"] for r in rows if "lengths" in r)
    temperatures = ", ".join(f"{t:g}" for t in sorted({r["temperature"] for r in rows if "temperature" in r}))
    hardware = "; ".join(dict.fromkeys(r["origin"][2]["hardware"] for r in rows))
    files = ", ".join(f"`{name}`" for name in dict.fromkeys(r["origin"][0] for r in rows))
    return (
        f"{hardware}. Ours has default settings, vLLM and llama.cpp the fastest of their modes that were "
        "tried. Tokens/s are those of all users together, with the reading of prompts; their text is greedy, "
        "and repeats itself more than that of large models, which helps every engine. Milliseconds are those "
        "of a new token after the prompt was read: medians over texts that nothing was tuned for, drawn at "
        f"T = {temperatures} (slowest to fastest); rows of several lengths have {lengths} texts. On the CPU "
        f"there is no draft model. **Slower:** {sum(ratio < 1 for ratio in loads)} of {len(loads)} loads of "
        f"the server, at the least {min(loads):.2f}x of vLLM; texts on the CPU have {min(on_cpu):.2f}x to "
        f"{max(on_cpu):.2f}x of llama.cpp's speed, over all lengths and temperatures with 4 to 16 bits. From "
        f"{files}, whose commits and dates are in [results](docs/results/README.md).\n"
    )


def _files_of(rows: Sequence[Record]) -> str:
    """Returns the files of the rows, each with commits and dates."""
    files: dict[str, dict[str, Record]] = {}
    for r in rows:
        file, part, header = r["origin"]
        files.setdefault(file, {})[part] = header
    return ", ".join(file_named(file, headers) for file, headers in files.items())


def _others(rows: Sequence[Record]) -> list[Record]:
    """Returns the rows of models that others trained, at their lowest temperature."""
    found = [r for r in rows if not r["part"].startswith(PAIR_SHAPE)]
    lowest = min((r["temperature"] for r in found), default=None)
    return [r for r in found if r["temperature"] == lowest]


def _place(r: Record) -> tuple[bool, int, str, int, float]:
    """Returns the sort key: whole cards first, then size, length and temperature."""
    return (
        "gpu_memory" in r["settings"],
        [*_SIZES].index(r["model"]),
        r["card"],
        r["context"],
        r["temperature"],
    )


def _sampled(file: str, content: Record) -> list[Record]:
    """Returns the medians of a file's sampled texts."""
    return [
        r | {
            "card": limited(r), "size": _size(r), "what": f"{r['texts']} of {r['kinds']} kinds",
            "origin": (file, r["part"], content["parts"][r["part"]]),
        }
        for r in texts.summary(content)
        if r["temperature"] > 0 and r["model"] in _SIZES
    ]  # fmt: skip


def _size(r: Record) -> str:
    levels = r["settings"].get("levels")
    return _SIZES[r["model"]] + (f", levels={levels}" if levels else "")


def limited(r: Record) -> str:
    """Returns the card, and which of its memory may be used."""
    limit = r["settings"].get("gpu_memory", "").replace("GiB", " GiB")
    return r["machine"] + (f" limited to {limit}: the rest in host memory" if limit else "")


def speed_note(any_text: Record, rows: Sequence[Record]) -> str:
    """Returns the files, and the vocabularies of their models."""
    entries = {_SIZES[r["model"]]: r["origin"][2]["settings"]["vocabulary"] for r in rows}
    sizes = ", ".join(f"{size} {n:,}" for size, n in entries.items())
    return f"Entries of the vocabularies: {sizes}. From {_files_of(rows)}.\n"


TABLES = {
    "front": Table(texts.ANY_TEXT, listing(FRONT, front_rows, front_note, left=1), texts.COMMAND),
    "by_card": Table(texts.ANY_TEXT, listing(SPEEDS, speed_rows, speed_note, left=4), texts.COMMAND),
}  # fmt: skip
