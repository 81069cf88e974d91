"""docs/results/heads.json: what trained heads foresee, beside the small draft."""

import json
from pathlib import Path
from typing import Any

from scripts.benchmarks.common.markdown import Record, Table, listing, noted
from scripts.benchmarks.common.results import header, write

FILE = "heads.json"
COMMAND = f"python -m scripts.train_pair.heads --kind eagle --engine --results docs/results/{FILE}"
_NOTE = (
    "Trained on {hardware}, torch {versions[torch]}, transformers {versions[transformers]}, seed {seed}; "
    "Python's help topics. "
)


def add(path: Path, seed: int, result: dict[str, Any]) -> None:
    """Write the figures of a training into a results file, in place of an earlier one of the same kind."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    others = [row for row in rows if row["kind"] != result["kind"]]
    write(path, header(seed) | {"rows": [*others, result]})


def _beside_draft(content: Record) -> list[Record]:
    """A line for each kind of heads, and one for the draft model, alike at every depth."""
    rows = []
    for row in content["rows"]:
        near, far = (row.get(f"{row['kind']}_overlap_{context}") for context in (2048, 65536))
        if near and far:
            shown = {"near": _listed(near), "far": f"{far[0]:.2f}", "share": far[0] / near[0]}
            shown["mb"] = row["bytes"] / 1e6
            rows.append(row | shown | {"name": row["kind"], "tokens": row.get("heads_tokens_per_pass")})
    if rows:
        draft = max(content["rows"], key=lambda row: row.get("draft_tokens_per_pass", 0.0))
        near, far = draft["draft_overlap_2048"], draft["draft_overlap_65536"]
        shown = {"near": f"{near:.2f}", "far": f"{far:.2f}", "share": far / near}
        rows.append(shown | {"name": "draft model", "tokens": draft.get("draft_tokens_per_pass")})
    return rows


def _listed(overlaps: list[float]) -> str:
    return ", ".join(f"{overlap:.2f}" for overlap in overlaps)


TABLES = {
    "heads": Table(
        FILE,
        listing(
            {
                "drafter": "{name}", "MB": "?{mb:.1f}", "training, s": "?{train_seconds:.0f}",
                "overlap by depth at 2,048": "{near}", "first at 65,536": "{far}", "of that": "{share:pct}",
                "tokens a pass": "?{tokens:.1f}",
            },
            _beside_draft,
            noted(_NOTE, FILE),
        ),
        COMMAND,
    )
}  # fmt: skip
