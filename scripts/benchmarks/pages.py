"""The generated pages of docs/results: which tables and pictures each shows, in order.

A table stands on one page: here, or on the guide of its subject.
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
    "long_outputs.md": Page("Speed by position in long texts", "../any_text.md#by-position", (
        Section(
            "On an H200", "long_outputs",
            "Medians over texts of each bin of new tokens, and mean shares of passes; brackets hold the "
            "lowest and the highest. Plain decoding continues the same text in the middle of the bin.",
        ),
        Section(
            "On a CPU", "long_outputs_cpu",
            "At T = 0.6 the texts of the embedded pair repeat themselves after the first thousand tokens.",
        ),
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
            "drafters_by_context.png",
        ),
        Section("Tokens a pass by kind of text", "drafters_kind", "Medians over contexts."),
        Section("Milliseconds a token", "drafters_speed", f"Default settings. {_SPEED_UP}"),
    )),
    "models.md": Page("Every class of transformers", "../models.md", (
        Section("Classes and paths", "models"),
    )),
    "requests.md": Page("Whole requests and sessions", "../sessions.md", (
        Section("Requests on a CPU", "requests_cpu"),
        Section("A conversation of many turns", "conversation_cpu"),
        Section(
            "A conversation with other caches", "conversation_caches_cpu",
            "Random models of six layers. Every turn computes its new tokens alone, after windows, recurrent "
            "states and keys in host memory too. The machine had other work, which all seconds include.",
        ),
        Section("A conversation of many turns on a GPU", "conversation_h200"),
        Section(
            "Turns of a coding agent", "conversation_agent_cpu",
            "The prompt of each turn is the recorded history: the engine prefills what the agent and its "
            "tools wrote since the turn before, and generates a reply that the next turn ignores. Where the "
            "text outgrows the buffers, the first token also waits for larger ones. The embedded pair is no "
            "agent: its greedy replies often repeat themselves, as the share of 8-grams that occur earlier "
            "in the same reply shows, and such text is easy to draft. The picture shows the turns of the "
            "conversation alone.",
            "conversation_cpu.png",
        ),
        Section(
            "Many clients of a server", "serving",
            "Times are those that clients see: from a request to its first text, from there to its last one "
            "by token, and between two pieces of text. vLLM 0.25.1 ran with n-grams of 2 to 4 tokens that "
            "propose 5, on the same card right after ours, and without drafts on another H200.",
        ),
    )),
    "peers.md": Page("Other engines on the same model", "../benchmarks.md#beside-other-engines", (
        Section(
            "Beside the fastest other engine on a GPU", "peers_gpu",
            "Every engine read the same checkpoints, the embedded pair inflated to the named shapes. Ours "
            "has default settings with the draft. Brackets hold the fastest and the slowest text. The draft "
            "model was trained on short texts. vLLM gives it the whole prompt, and ours the newest tokens, "
            "so few of its tokens are accepted in vLLM's mode `draft`.",
        ),
        Section(
            "Beside the fastest other engine on a CPU", "peers_cpu",
            "SmolLM2-135M was read from one GGUF file in Q4_1, and converted to other formats. Ours has "
            "default settings without a draft model, so it drafts by suffix matching. Below 1x the other "
            "engine, in the fastest of its modes that was tried, is faster.",
        ),
        Section("Every engine and mode on a GPU", "peers_gpu_all"),
        Section("Every engine and mode on a CPU", "peers_cpu_all"),
    )),
    "several_cards.md": Page("One text on several cards", "../splitting.md#measure-again", (
        Section(
            "Stages",
            "sequence_parallel",
            "The picture projects the line of 1,048,576 tokens to more cards with the communication "
            "model of the Tree Attention paper. Tree Attention merges in log2(cards) steps, each as long as "
            "that of two cards. Ring Attention passes all keys and values on, at 450 GB/s within a machine "
            "of eight cards and 50 GB/s between machines.",
            "sequence_parallel_projection.png",
        ),
        Section(
            "Whole decoding",
            "sequence_parallel_texts",
            '"Speed-up kept" is the speed-up over plain decoding, divided by that on one card. The '
            "figures are rough, since each comes from one text of 256 tokens, and in bf16 nearly equal "
            "logits lead to different texts on different splits.",
        ),
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
        "Generated by `python -m scripts.benchmarks tables`. What is measured, and how: "
        f"[guide]({page.guide}). Commit, date and hardware of each file: [results files](README.md).",
    ]
    for heading, table, about, picture in page.sections:
        parts += [f"## {heading}", about, f"![{heading}]({picture})" if picture else ""]
        parts.append(f"<!-- table: {table} -->\n<!-- end table -->")
    return "\n\n".join(part for part in parts if part) + "\n"


def index() -> str:
    """Returns a line for each page."""
    return "".join(f"- [{page.title}]({name})\n" for name, page in PAGES.items())
