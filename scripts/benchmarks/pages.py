"""The generated pages of docs/results: which tables and pictures each shows, in order.

A table stands on one page. The main one of a subject is on its guide.
"""

from typing import NamedTuple


class Section(NamedTuple):
    """One table, with a sentence that says how to read it, and a picture of it in docs/results."""

    heading: str
    table: str
    about: str = ""
    picture: str = ""


class Page(NamedTuple):
    """A page: its title, the guide that says what is measured, and its sections."""

    title: str
    guide: str
    sections: tuple[Section, ...]


_SPEED_UP = "Speed-ups are ratios to plain decoding in the same process, from the same keys and values."
PAGES = {
    "one_gpu.md": Page("One GPU, and every card and length", "../measurements.md", (
        Section(
            "Every card and length", "by_card",
            "Default settings unless a row says otherwise; medians over texts, in brackets the slowest and "
            "the fastest text.",
        ),
        Section("Whole requests", "front_requests", "Seconds until an answer of 256 tokens is complete."),
        Section(
            "Time of each level", "on_chip_levels",
            "In the picture full colour is the time at the roofline, pale colour what was taken above it.",
            "on_chip_levels.png",
        ),
        Section(
            "Acceptance and exactness", "on_chip_acceptance",
            '"Accepts" is the share of the proposed depth that was accepted.',
        ),
        Section(
            "Length of the prompt", "on_chip_lengths", "Beginnings of the same texts.", "on_chip_lengths.png"
        ),
        Section(
            "Length of the output", "on_chip_outputs", "One long decoding per prompt, read off on its way."
        ),
        Section("What is paid once", "on_chip_costs"),
        Section("Prompts", "on_chip_texts"),
    )),
    "any_text.md": Page("Speed by text", "../any_text.md", (
        Section("Every text on an H200", "any_text", _SPEED_UP, "any_text.png"),
        Section("Every text on a CPU", "any_text_cpu", _SPEED_UP),
    )),
    "never_slower.md": Page("Speed-up by context and text", "../any_text.md#by-context", (
        Section(
            "On an H200", "never_slower",
            "Bold cells are below 0.98; with several pairs of runs, those below it by more than two standard "
            "errors.",
            "never_slower.png",
        ),
        Section("On a CPU", "never_slower_cpu"),
    )),
    "real_model.md": Page("A model that others trained", "../measurements.md#a-model-that-others-trained", (
        Section("Medians on an H200", "real_model_summary", _SPEED_UP),
        Section("Every text on an H200", "real_model", _SPEED_UP),
        Section("Every text on a CPU", "real_model_cpu", _SPEED_UP),
    )),
    "drafters.md": Page("Trained drafters", "../trained_drafters.md", (
        Section(
            "Tokens a pass by context", "drafters_context",
            "Every drafter has the same chain or tree, two levels and one round. Medians over texts; the "
            "last column is the ratio of two contexts.",
        ),
        Section("Tokens a pass by kind of text", "drafters_kind", "Medians over contexts."),
        Section("Milliseconds a token", "drafters_speed", f"Default settings. {_SPEED_UP}"),
    )),
    "models.md": Page("Every class of transformers", "../models.md", (
        Section("Classes and paths", "models"),
    )),
    "offloading.md": Page("Caches and weights in host memory", "../offloading.md", (
        Section("Speed", "offload_headline"),
        Section("Time and acceptance of each level", "offload_levels"),
        Section("Memory", "offload_memory"),
        Section("Reading the prompt", "offload_prefill"),
        Section("Projections to a slower bus", "offload_projections"),
        Section("Several cards", "parallel_speed"),
    )),
    "requests.md": Page("Whole requests and sessions", "../sessions.md", (
        Section("Requests on a CPU", "requests_cpu"),
        Section("A conversation of many turns", "conversation_cpu"),
        Section(
            "Many clients of a server", "serving",
            "Times are those that clients see: from a request to its first text, from there to its last one "
            "by token, and between two pieces of text.",
        ),
    )),
    "prefill.md": Page("Prefill", "../prefill.md", (
        Section("Attention alone", "prefill_attention"),
        Section("Prompts on a CPU", "cpu_prefill"),
    )),
    "cpu.md": Page("The embedded pair on a CPU", "../cpu.md", (
        Section("Acceptance", "cpu_16k_acceptance"),
        Section("What the pair can do", "pair"),
    )),
    "several_cards.md": Page("One text on several cards", "../several_cards.md", (
        Section("Whole decoding", "sequence_parallel_texts"),
    )),
    "kernels.md": Page("Kernels", "../kernel.md", (
        Section("Tree attention beside its peers", "tree_attention_cells", picture="tree_attention_h200.png"),
        Section("Layouts of the cache", "tree_attention_layouts"),
        Section("Goals", "tree_attention_aims"),
        Section("Compiled for other GPUs", "kernels_by_arch"),
    )),
    "exact.md": Page("Bit-exact decoding", "../exact.md", (
        Section("Greedy texts and times", "bit_exact"),
    )),
}  # fmt: skip


def source(name: str) -> str:
    """Returns the Markdown of a page, with a marker in the place of each table."""
    page = PAGES[name]
    parts = [
        f"# {page.title}",
        "Generated by `python -m scripts.benchmarks tables`. What is measured, how, and the main table: "
        f"[guide]({page.guide}). Commit, date and hardware of each file: [results files](README.md).",
    ]
    for heading, table, about, picture in page.sections:
        parts += [f"## {heading}", about, f"![{heading}]({picture})" if picture else ""]
        parts.append(f"<!-- table: {table} -->\n<!-- end table -->")
    return "\n\n".join(part for part in parts if part) + "\n"


def index() -> str:
    """Returns a line for each page."""
    return "".join(f"- [{page.title}]({name})\n" for name, page in PAGES.items())
