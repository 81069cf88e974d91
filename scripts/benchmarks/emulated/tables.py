"""The tables of docs/consumer_cards.md about emulated cards: computed plans, and what was measured."""

from collections.abc import Mapping, Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

PLANS, FILE = "cards_plan.jsonl", "cards_h200.jsonl"
PLAN_COMMAND = "python -m scripts.benchmarks cards --plan"
COMMAND = "python -m scripts.benchmarks cards"
# Uses of device memory that are shown together.
_LEVEL_ONE = ("level 1: chunks and window", "chunk means", "draft")
_KV = ("KV", "resident KV")


def _gib(plan: Record, names: Sequence[str]) -> str:
    return f"{sum(plan['device_gib'].get(name, 0.0) for name in names):.1f}"


def _others(row: Record) -> str:
    names = row["plan"]["device_gib"].keys() - {"weights", "free", *_LEVEL_ONE, *_KV}
    return _gib(row["plan"], sorted(names))


def _chosen(row: Record) -> str:
    """Returns what the plan has chosen; without offloading that depends on measured times."""
    if not row["plan"]["offloaded"]:
        return ""
    options = row["plan"]["options"]
    return ", ".join(f"{name} {options[name]}" for name in ("budget", "chunk", "gamma"))


def _model(row: Record) -> str:
    """Returns the model, and what was set beside the memory of the card."""
    bits = row["plan"]["options"]["kv_bits"]
    return row["model"] + (f", cache in {bits} bits" if bits != 16 else "")


PLAN_COLUMNS: Columns = {
    "model": _model, "tokens": "{context:,}",
    "weights": "{plan[device_gib][weights]:.1f}", "draft and level 1": lambda r: _gib(r["plan"], _LEVEL_ONE),
    "KV on the card": lambda r: _gib(r["plan"], _KV), "ring, prefill, graphs": _others,
    "free": "{plan[device_gib][free]:.1f}",
    "KV in host memory": lambda r: f"{sum(r['plan']['host_gib'].values()):.1f}", "chosen": _chosen,
    "plain token, ms": "{bounds[plain][ms]:.1f}", "target pass, ms": "{bounds[pass][ms]:.1f}",
    "tokens in it": "{bounds[pass][tokens]}",
}  # fmt: skip
MEASURED: Columns = {
    "model": _model, "tokens": "{context:,}", "text": "{text}", "T": "{temperature:g}",
    "**ms/token**": "**{ms_per_token:.2f}**", "of it the link": "{link_ms_per_token[ours]:.2f}",
    "bound": "{bound_ms_per_token[ours]:.2f}", "tokens a pass": "{tokens_per_pass:.1f}",
    "plain": "{plain_ms_per_token:.1f}", "plain, the link": "{link_ms_per_token[plain]:.1f}",
    "plain, bound": "{bound_ms_per_token[plain]:.1f}", "**speed-up**": "**{speedup:.2f}x**",
    "prefill, s": "{prefill_seconds:.1f}", "projected: ms/token": "?{projected[ms_per_token]:.1f}",
    "plain ": "?{projected[plain_ms_per_token]:.1f}", "speed-up": "?{projected[speedup]:.1f}x",
    "prefill, s ": "?{projected[prefill_seconds]:.0f}",
}  # fmt: skip


def _fitting(content: Record) -> list[Record]:
    return [row for row in content["rows"] if "refused" not in row]


def _ordered(content: Record) -> list[Record]:
    return sorted(content["rows"], key=lambda row: (row["model"], row["context"], row["temperature"]))


TABLES: Mapping[str, Table] = {
    "cards_plan": Table(
        PLANS,
        listing(
            PLAN_COLUMNS, _fitting,
            noted("GiB; computed from sizes for an RTX 4090 in a machine of 64 GiB, not measured. ", PLANS),
        ),
        PLAN_COMMAND,
    ),
    "cards": Table(
        FILE,
        listing(
            MEASURED, _ordered,
            noted("{hardware} as an RTX 4090; inflated models. The last four columns are projected. ", FILE),
            left=3,
        ),
        COMMAND,
    ),
}  # fmt: skip
