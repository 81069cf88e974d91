"""All benchmarks by name."""

# Name -> module below ``scripts`` with ``main(words)``, and what it measures.
BENCHMARKS = {
    "tables": ("benchmarks.tables", "no benchmark: writes the tables of README.md and docs/"),
    "series": ("benchmarks.series.run", "the benchmarks of a GPU one after another, within a time limit"),
    "texts": ("benchmarks.texts.pack", "no benchmark: packs texts of seven kinds into one file"),
    "on_chip": ("benchmarks.on_chip.run", "decoding on one GPU, 122,880 tokens: docs/measurements.md"),
    "prefill": ("benchmarks.on_chip.prefill", "prompts of up to 122,880 tokens on one GPU: docs/prefill.md"),
    "requests": (
        "benchmarks.requests.run",
        "whole requests, cold and a second turn, beside plain decoding: docs/sessions.md",
    ),
    "shared_prefix": (
        "benchmarks.requests.shared_prefix",
        "questions about one or two documents in a batch, keys and values stored once beside copies",
    ),
    "clients": (
        "benchmarks.requests.clients",
        "clients that ask about one document and join a batch, keys and values stored once beside copies",
    ),
    "saved_sessions": (
        "benchmarks.requests.saved",
        "saving and loading a session beside writing and reading as many bytes: docs/sessions.md",
    ),
    "any_text": ("benchmarks.texts.any_text", "speed on texts of seven kinds: docs/any_text.md"),
    "never_slower": ("benchmarks.texts.never_slower", "the same by context, beside plain decoding"),
    "tuned": (
        "benchmarks.texts.tuned",
        "default settings beside those that tune finds for the cell: docs/defaults.md",
    ),
    "real_model": (
        "benchmarks.texts.real_model",
        "three levels of SmolLM2 and of its function at 8B: docs/measurements.md",
    ),
    "trees": ("benchmarks.texts.trees", "token trees beside chains of equal cost, by kind of text"),
    "offload": ("benchmarks.offload.run", "decoding with the cache in host memory: docs/offloading.md"),
    "parallel": ("benchmarks.offload.parallel", "the same on several cards, under torchrun"),
    "split": (
        "benchmarks.cards.split",
        "stages on several cards, a text split by position or by heads; --texts: whole decoding",
    ),
    "rope": (
        "benchmarks.rope.run",
        "the embedded pair at more positions, with YaRN: docs/several_cards.md",
    ),
    "tree_attention": (
        "benchmarks.attention.run",
        "tree attention beside its peers; --check: the gate",
    ),
    "workloads": (
        "benchmarks.workloads.run",
        "texts that branch, as DeFT, FastTree and PAT build them: docs/branching.md",
    ),
    "workload_bytes": (
        "benchmarks.workloads.read_bytes",
        "KV bytes that attention over them reads, counted by Nsight Compute: docs/branching.md",
    ),
    "exact": ("benchmarks.exact.run", "greedy texts and times of bit-exact mode: docs/losslessness.md"),
    "linear": ("benchmarks.linear.run", "few-row linear layers: check, time, compare; --quick: less"),
    "host_attention": ("benchmarks.cpu.host_attention", "attention on the CPU, alone and beside the bus"),
    "cpu": ("benchmarks.cpu.speed", "the embedded pair on a CPU beside transformers: docs/cpu.md"),
    "cpu_prefill": ("benchmarks.cpu.prefill", "prompts on a CPU beside transformers: docs/prefill.md"),
    "retrieval": (
        "benchmarks.retrieval.run",
        "overlap of level 1 with the target by retrieval policy: docs/retrieval.md",
    ),
    "verification": (
        "benchmarks.verification.run",
        "tokens that traversal verification accepts beside node by node: docs/losslessness.md",
    ),
    "pair": ("train_pair.evaluate", "what the embedded pair can do: needles, loss, overlaps"),
    "kernels_by_arch": ("checks.kernels_by_arch", "compiles every kernel for GPUs not at hand"),
}
