"""Lists all benchmarks by name."""

import re
from typing import NamedTuple

# The machine in the name of a results file: ``h200``, ``cpu``.
MACHINE = "{machine}"


class Benchmark(NamedTuple):
    """A module below ``scripts`` with ``main(words)``.

    Attributes:
        about: what it measures.
        writes: name of its file in docs/results; "" where it writes none there.
    """

    module: str
    about: str
    writes: str = ""

    def wrote(self, file: str) -> bool:
        """Returns whether it writes results files of this name."""
        pattern = re.escape(self.writes).replace(re.escape(MACHINE), "[a-z0-9]+")
        return bool(re.fullmatch(pattern, file)) if self.writes else False


BENCHMARKS = {
    "tables": Benchmark("benchmarks.tables", "no benchmark: writes the tables of README.md and docs/"),
    "texts": Benchmark("benchmarks.texts.pack", "no benchmark: packs texts of seven kinds into one file"),
    "requests": Benchmark(
        "benchmarks.requests.run",
        "whole requests, cold and a second turn, beside plain decoding: docs/sessions.md",
        "requests_{machine}.jsonl",
    ),
    "serving": Benchmark(
        "benchmarks.requests.serving",
        "1 to 32 clients of our server, or of another: docs/server_operation.md",
        "serving_{machine}.jsonl",
    ),
    "conversation": Benchmark(
        "benchmarks.requests.conversation",
        "a conversation of many turns, or a coding agent's, alone and beside another one: docs/sessions.md",
        "conversation_{machine}.jsonl",
    ),
    "any_text": Benchmark(
        "benchmarks.texts.any_text",
        "speed on texts of seven kinds: docs/any_text.md",
        "any_text_{machine}.jsonl",
    ),
    "never_slower": Benchmark(
        "benchmarks.texts.never_slower",
        "the same by context, beside plain decoding",
        "never_slower_{machine}.jsonl",
    ),
    "long_outputs": Benchmark(
        "benchmarks.texts.long_outputs",
        "speed by position in texts of 16,384 new tokens",
        "long_outputs_{machine}.jsonl",
    ),
    "real_model": Benchmark(
        "benchmarks.texts.real_model",
        "three levels of SmolLM2 and of its function at 8B: docs/measurements.md",
        "real_model_{machine}.jsonl",
    ),
    "peers": Benchmark(
        "benchmarks.peers.run",
        "the same model through other engines, each in its own process: docs/benchmarks.md",
        "peers_{machine}.jsonl",
    ),
    "drafters": Benchmark(
        "benchmarks.drafters.run",
        "trained drafters beside the small draft, by context and kind of text: docs/trained_drafters.md",
        "drafters_{machine}.jsonl",
    ),
    "cards": Benchmark(
        "benchmarks.emulated.run",
        "decoding as on a consumer card, which a larger GPU emulates: docs/consumer_cards.md",
        "cards_{machine}.jsonl",
    ),
    "split": Benchmark(
        "benchmarks.cards.split",
        "stages on several cards, a text split by position or by heads; --texts: whole decoding",
        "sequence_parallel_{machine}.jsonl",
    ),
    "tree_attention": Benchmark(
        "benchmarks.attention.run",
        "tree attention beside its peers",
        "tree_attention_h200.jsonl",
    ),
    "paper": Benchmark(
        "benchmarks.paper",
        "tables 2 to 4 of TriForce's paper with any pair: docs/benchmarks.md",
    ),
    "exact": Benchmark(
        "benchmarks.exact.run",
        "greedy texts and times of bit-exact mode: docs/exact.md",
        "bit_exact_{machine}.jsonl",
    ),
    "kernels_by_arch": Benchmark(
        "checks.kernels_by_arch.__main__",
        "compiles every kernel for GPUs not at hand",
        "kernels_by_arch.jsonl",
    ),
}
