"""Figures of the JSON files that ``scripts/benchmarks`` and ``scripts/checks`` write, by what they are of.

A file is read whole: each member of a list of dictionaries is a record, wherever the list stands, and what
is outside of lists is one record more. Of a record, the fields in ``_PLACE`` say what it is about; other
numbers, also those in nested dictionaries and lists, are figures. What describes how something was measured
is neither.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triforce_tree.eval.report.table import Place

Figure = float | str
Cells = Mapping[Place, Mapping[str, Figure]]
Content = Mapping[str, Any]

# In the order in which they are shown; the first ones without their names.
_NAMED = (
    "of", "what", "part", "model", "model_type", "class", "feature_set", "shape", "path", "kind", "text",
    "workload", "case", "method", "way", "policy", "operator", "kernel", "cell", "layout", "link", "level",
    "turn", "on", "variant",
)  # fmt: skip
_PLACE = (
    *_NAMED, "machine", "device", "arch", "cards", "gpus", "clients", "prompt", "where", "batch", "context",
    "original", "new_tokens", "scale", "temperature", "setting", "settings", "varied", "dtype", "kernels",
    "vocabulary", "levels", "level_1", "tree", "runner_ups", "rounds", "chunk", "budget", "own_query",
    "threads", "spread", "hq", "hkv", "l", "t", "heads", "layer", "bits", "rows", "ins", "outs", "nodes",
    "draws", "drawn", "retrieval_weight_bits", "share", "pieces",
)  # fmt: skip
# Fields that say what a record is about only beside another: elsewhere they are counts or figures.
_BESIDE = {"rounds": "level", "share": "pieces"}
# What the header of a file or a part says of all its records.
_OF_ALL = ("context", "new_tokens", "scale", "text", "vocabulary", "clients")
# Numbers that are chosen, counted or computed on paper.
_GIVEN = frozenset((
    "seed", "seeds", "threads", "runs", "times", "prompts", "prompt_tokens", "prefill_prompts", "texts",
    "tokens", "all_tokens", "compared", "needles", "needle_trials", "verifications", "positions", "steps",
    "tried", "rounds", "temperature", "warm_up_rounds", "checked", "measured", "cases", "replays", "gamma",
    "limit_bytes", "corpus_tokens", "tune_seconds", "gpu_memory_cap_gib", "kv_megabytes", "paper_megabytes",
    "kv_bytes", "kv_gib", "counted_kv_and_queries", "prefix", "complete", "interrupted", "captured",
))  # fmt: skip
# Settings, machines, choices, raw counts, and what is computed from other figures.
_OTHER = frozenset((
    "versions", "code", "options", "config", "chosen", "changed", "memory_plan", "cpu", "size", "machine",
    "processor", "notes", "sources", "held_out", "parameters", "choices", "older", "failed", "missing",
    "passes", "serialized", "spills", "by_depth", "peers_without_a_time", "evaluated", "commits", "paths",
    "drafts", "shapes", "torch_held_to", "collectives", "projection",
))  # fmt: skip
# Outcomes in words.
_WORDS = frozenset(("outcome",))


def cells_of_rows(content: Content) -> Cells:
    """The figures of a results file by place.

    Raises:
        ValueError: two records say the same about what they are of.
    """
    parts = content.get("parts")
    headers = parts if isinstance(parts, dict) else {"": content}
    found: dict[Place, dict[str, Figure]] = {}
    for place, record in _records(content, (), headers):
        if place in found:
            raise ValueError(
                f"two records are both of {told(place)!r}; the field that tells them apart is missing in "
                f"_PLACE of {__name__}"
            )
        found[place] = dict(_figures(record))
    return {place: figures for place, figures in found.items() if figures}


def told(place: Place) -> str:
    """A place in words."""
    if not place:
        return "the whole file"
    said = {"temperature": "T=", "T": "T=", **dict.fromkeys(_NAMED, "")}
    return ", ".join(said.get(name, f"{name} ") + value for name, value in place)


def own_parts(theirs: Content, mine: Content) -> Content:
    """My file without the parts that it has taken over from theirs.

    A benchmark begins a new file as a copy of the published one, and measures some of its parts.
    """
    parts, known = mine.get("parts"), theirs.get("parts")
    if not isinstance(parts, dict) or not isinstance(known, dict):
        return mine
    own = {name: header for name, header in parts.items() if known.get(name) != header}
    if not own:  # one file, compared with itself
        return mine
    return {**mine, "parts": own, "rows": [row for row in mine["rows"] if row["part"] in own]}


def _records(value: Content, place: Place, headers: Mapping[str, Content]) -> Iterator[tuple[Place, Content]]:
    """A record and those in its lists, each with all that it is about."""
    yield place, value
    for path, inner in _lists_of_records(value, ()):
        named = () if path == ("rows",) and not place else (("of", " ".join(path)),)
        for record in inner:
            header = headers.get(record.get("part", ""), headers.get("", {}))
            yield from _records(
                record, (*place, *named, *_place(record, header, outermost=not place)), headers
            )


def _lists_of_records(
    value: Content, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Sequence[Content]]]:
    for name, inner in value.items():
        if name in _OTHER or (name in ("parts", "settings", "setting") and isinstance(inner, dict)):
            continue
        if isinstance(inner, dict):
            yield from _lists_of_records(inner, (*path, name))
        elif isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
            yield (*path, name), inner


def _place(record: Content, header: Content, outermost: bool) -> Place:
    """What a record is about, and what its header says of all; the machine that was measured is left out."""
    hardware = str(header.get("hardware", ""))
    fields = {
        name: value
        for name, value in record.items()
        if _is_place(name, value, record) and not (name in ("machine", "device") and str(value) in hardware)
    }
    # Parts of a grid are named by what their rows say as well, some of them by hand.
    if "model" in fields:
        fields.pop("part", None)
    if outermost:
        fields |= {n: header[n] for n in _OF_ALL if n not in fields and _is_place(n, header.get(n), header)}
    return tuple((name, _word(fields[name])) for name in _PLACE if name in fields)


def _is_place(name: str, value: Any, record: Content) -> bool:
    if name in ("setting", "settings", "outs"):
        return True
    if name not in _PLACE or not isinstance(value, str | int | float):
        return False
    return name not in _BESIDE or _BESIDE[name] in record


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _figures(record: Content) -> Iterator[tuple[str, Figure]]:
    """Numbers, and outcomes in words, of a record without the records in its lists."""
    for name, value in record.items():
        # Of parts with headers; those of a prefill are seconds.
        headers = name == "parts" and isinstance(value, dict) and not _are_numbers(value)
        if not headers and not _is_place(name, value, record):
            yield from _leaves((name,), value)


def _are_numbers(value: Content) -> bool:
    return all(isinstance(inner, int | float) for inner in value.values())


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Figure]]:
    name = path[-1]
    if name in _OTHER or (name in _GIVEN and not isinstance(value, dict)):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if not isinstance(inner, dict):
                yield from _leaves((*path, str(number + 1)), inner)
    elif isinstance(value, bool):
        yield " ".join(path), "yes" if value else "no"
    elif isinstance(value, int | float):
        yield " ".join(path), float(value)
    elif name in _WORDS and isinstance(value, str):
        yield " ".join(path), value
