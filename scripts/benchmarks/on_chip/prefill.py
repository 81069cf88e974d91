"""Prefill on one GPU: seconds and TFLOP/s of whole prompts, by shape, context, chunk and attention.

    python -m scripts.benchmarks prefill
    python -m scripts.benchmarks prefill --shapes llama-3.1-8b --contexts 32768 --chunks 4096

Models have the shape's weights, random but for those of the inflated pair; times do not depend on them. Each
row is the median of the runs after a first one, whose seconds stand beside it: libraries make their plans in
it. FLOPs are 2 a weight and token, without embedding and head, and 2 x 2 a head's element and pair of
positions that attend; the roofline is a product of 8192 x 8192 matrices in bf16, measured in the same run.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from scripts.benchmarks.common.command import TINY_SHAPES, device_of, parser, results_folder
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.on_chip.tables import PREFILL_FILE, PREFILL_PATHS
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.eval.attention.problems import measure_ceilings
from triforce_tree.eval.attention.timing import timed
from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.loading.inflate import inflate
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.executor import free_memory

PATHS = tuple(PREFILL_PATHS)


@contextmanager
def attention(path: str) -> Iterator[None]:
    """Inside, prefill takes this path."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and path == "engine")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def flops(model: HFModel, tokens: int) -> float:
    """Of the layers' linears and attention over so many tokens."""
    layers = sum(w.numel() for name, w in model.model.named_parameters() if "layers" in name and w.dim() == 2)
    heads = model.heads
    pairs = tokens * (tokens + 1) / 2
    return 2.0 * layers * tokens + 2.0 * (heads.dim + heads.value_dim) * heads.query * pairs * model.layers


def measure(model: HFModel, context: int, chunk: int, path: str, runs: int) -> Record:
    """Seconds of a prompt: of the first run and the median of the others."""
    config = HierarchyConfig.from_options(levels=1, prefill_chunk=chunk)
    prompts = [torch.randint(3, model.vocab_size, (context + 1,)).tolist()]
    with model.active(), attention(path):
        program = DecodingProgram(model, None, config, 1, context + 1, 1)
        seconds = [timed(model.device, lambda: program.prefill(prompts))[1] for _ in range(1 + runs)]
    return {"first_seconds": seconds[0], "seconds": statistics.median(seconds[1:])}


def inflated(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The embedded target in this shape."""
    return inflate(load_model(PAIR / "target", device, dtype), shape)


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks prefill", __doc__)
    made.add_argument("--shapes", nargs="+", default=["llama-2-7b", "llama-3.1-8b"], metavar="SHAPE")
    made.add_argument("--contexts", nargs="+", type=int, default=[32_768, 122_880], metavar="N")
    made.add_argument("--chunks", nargs="+", type=int, default=[4096, 8192, 16_384], metavar="N")
    made.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS, help="attention")
    made.add_argument("--runs", type=int, default=2, help="timed runs after the first one")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    contexts, chunks = ([384], [128]) if args.tiny else (args.contexts, args.chunks)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    torch.manual_seed(args.seed)
    peak = 0.0 if args.tiny else measure_ceilings().matmul_rate / 1e12
    head = header(args.seed, "engine") | {"matmul_tflops": peak}
    path, rows = results_folder(args.out, args.tiny) / PREFILL_FILE, []
    for shape in args.shapes:
        model = HFModel(inflated(TINY_SHAPES[shape] if args.tiny else shape, device, dtype))
        free_memory()
        for context in contexts:
            for chunk in chunks:
                for how in args.paths:
                    row: Record = {"shape": shape, "context": context, "chunk": chunk, "path": how}
                    row["vocabulary"] = model.vocab_size
                    row |= measure(model, context, chunk, how, args.runs)
                    row["tflops"] = flops(model, context) / row["seconds"] / 1e12
                    row["roofline_share"] = row["tflops"] / peak if peak else None
                    rows.append(row)
                    print(row, flush=True)
                    write(path, head | {"rows": rows})
        del model
        free_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
