"""The tables of more positions than a model was trained on: docs/results/rope_MACHINE.json."""

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE = "rope_{machine}.json"
COMMAND = "python -m scripts.benchmarks rope"
COLUMNS: Columns = {
    "text": "{text}", "tokens": "{context:,}", "YaRN": lambda row: _setting(row["setting"]),
    "loss, nats": "{loss:.3f}", "retrieval level": "{retrieval_overlap:.3f}", "draft": "{draft_overlap:.3f}",
    "needles found": lambda row: f"{row['found'] * row['needles']:.0f} of {row['needles']}",
}  # fmt: skip
_NOTE = (
    "The embedded pair on {hardware}, {rows[0][dtype]}; YaRN by factor, attention factor, beta fast and beta "
    "slow of transformers' `rope_parameters`, - for the default. Loss over {rows[0][tokens]} tokens after "
    "the text, overlap of each level with the target over the same ones. "
)


def ordered(content: Record) -> list[Record]:
    return sorted(content["rows"], key=lambda row: (row["text"], row["context"]))


def _setting(setting: str) -> str:
    return "plain rope" if setting == "1" else setting.replace("::", " - ").replace(":", " ")


def _table(machine: str, command: str) -> Table:
    file = FILE.format(machine=machine)
    return Table(file, listing(COLUMNS, ordered, noted(_NOTE, file), left=3), command)


TABLES = {
    "rope_cpu": _table("cpu", COMMAND),
    "rope_h200": _table("h200", f"{COMMAND} --contexts 122880 262144 524288 1048000"),
}
