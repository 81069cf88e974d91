"""Measures prefill on one GPU: seconds and TFLOP/s of whole prompts, by shape, context, chunk and path.

    python -m scripts.benchmarks prefill
    python -m scripts.benchmarks prefill --shapes llama-3.1-8b --contexts 32768 --chunks 4096

Models have weights of the given shape, most of them random; times do not depend on the values. Before a
prompt is timed, a prompt of two chunks compiles the kernels, and attention with each of the prompt's shapes
lets libraries make their plans. Each row has the seconds of both. FLOPs are 2 per weight and token, without
embedding and head, and 2 x 2 per element of a head and pair of positions that attend. The roofline is a
product of 8192 x 8192 matrices in bf16, measured in the same run. Parts are timed on the device: attention in
all layers, linears in one of eight layers.

``--paths``: "engine" is the engine's prefill. "eager" has the layers of transformers. "cudnn" and
"flash-attn-4" are the two implementations from which the engine chooses if flash-attn 4 is installed, and
"flash" is torch's flash attention. All paths except "engine" are measured only with the first chunk size. The
attention of one layer is also measured alone, for a chunk after the context.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from scripts.benchmarks.attention.problems import measure_ceilings
from scripts.benchmarks.common.command import TINY_SHAPES, device_of, parser, results_folder
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.common.timing import synchronize, timed
from scripts.benchmarks.on_chip.prefill_paths import PATHS, attention_alone, usable, way
from scripts.benchmarks.on_chip.tables import PREFILL_FILE
from scripts.inflate.pair import inflate
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.attention import flash_attn_4
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kv import prefill
from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.runtime.executor import free_memory

# Fewest positions of a call of cuDNN's attention; the linears of one of so many layers are timed.
_BLOCK, _EACH = 4096, 8


class Parts:
    """A timer of the linears and of the attention of a model, on the device."""

    def __init__(self, model: HFModel) -> None:
        self._device, self._layers = model.device, decoder_layers(model.model)
        self._spans: dict[str, list[tuple[Any, Any]]] = {"linears": [], "attention": []}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures forwards of copies of the model that are made in its context."""
        own = prefill.windowed_attention

        def attention(*args: Any) -> Any:
            begun = self._now()
            out = own(*args)
            self._spans["attention"].append((begun, self._now()))
            return out

        def before(module: nn.Module, *_: Any) -> None:
            begun[type(module)] = self._now()

        def after(module: nn.Module, *_: Any) -> None:
            self._spans["linears"].append((begun[type(module)], self._now()))

        begun: dict[type, Any] = {}
        with ExitStack() as stack:
            for layer in list(self._layers)[::_EACH]:
                for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
                    stack.callback(linear.register_forward_pre_hook(before).remove)
                    stack.callback(linear.register_forward_hook(after).remove)
            stack.enter_context(mock.patch.object(prefill, "windowed_attention", attention))
            yield

    def reset(self) -> None:
        for spans in self._spans.values():
            spans.clear()

    def seconds(self) -> Record:
        """Returns the seconds of all layers since the last reset."""
        synchronize(self._device)
        sums = {name: sum(self._between(*span) for span in spans) for name, spans in self._spans.items()}
        count = len(self._layers)
        return sums | {"linears": sums["linears"] * count / len(range(0, count, _EACH))}

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        return begun.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - begun


def flops(model: HFModel, tokens: int) -> float:
    """Returns the FLOPs of linears and attention of all layers for a prompt of ``tokens`` tokens."""
    layers = sum(w.numel() for name, w in model.model.named_parameters() if "layers" in name and w.dim() == 2)
    heads = model.heads
    pairs = tokens * (tokens + 1) / 2
    return 2.0 * layers * tokens + 2.0 * (heads.dim + heads.value_dim) * heads.query * pairs * model.layers


def warm_up(model: HFModel, run: Callable[[int], object], context: int, chunk: int) -> None:
    """Compiles the kernels of a prompt, and lets libraries make their plans for its shapes."""
    run(min(2 * chunk, context))
    heads, options = model.heads, {"dtype": model.dtype, "device": model.device}
    for queries in {min(chunk, context), context % chunk} - {0}:
        # The positions before a chunk are divided into blocks of these sizes.
        before, size = 0, _BLOCK
        while before + size + queries <= context:
            before, size = before + size, 2 * size
        q = torch.zeros(1, queries, heads.query, heads.dim, **options).transpose(1, 2)
        keys = torch.zeros(1, heads.kv, before + queries, heads.dim, **options)
        # The engine chooses between cuDNN and flash-attn 4 again when the context has doubled.
        for bits in range(queries.bit_length(), keys.shape[2].bit_length()):
            seen = keys[:, :, : 1 << bits]
            causal_attention(q, seen, seen, scale=1.0)
        causal_attention(q, keys, keys, scale=1.0)


def measure(model: HFModel, context: int, chunk: int, path: str, runs: int) -> Record:
    """Returns the median seconds of a prompt, the seconds of its parts, and the seconds of the warm-up."""
    config = HierarchyConfig.from_options(levels=1, prefill_chunk=chunk)
    prompt, parts = torch.randint(3, model.vocab_size, (context + 1,)).tolist(), Parts(model)
    flash_attn_4.choices.clear()
    with way(path), parts.measured(), model.active():
        program = DecodingProgram(model, None, config, 1, context + 1, 1)

        def run(tokens: int) -> object:
            return program.prefill([prompt[: tokens + 1]])

        _, warm = timed(model.device, lambda: warm_up(model, run, context, chunk))
        parts.reset()
        seconds = [timed(model.device, lambda: run(context))[1] for _ in range(runs)]
    total = statistics.median(seconds)
    spent = {name: value / runs for name, value in parts.seconds().items()}
    spent["rest"] = statistics.mean(seconds) - sum(spent.values())
    # ``flash_attn_4`` counts the compared kinds of calls for which the engine chose flash-attn 4.
    chosen = {"compared": len(flash_attn_4.choices), "flash_attn_4": sum(flash_attn_4.choices.values())}
    return {"warm_up_seconds": warm, "seconds": total, "parts": spent, "choices": chosen}


def inflated(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the bundled target, inflated to this shape."""
    return inflate(load_model(PAIR / "target", device, dtype), shape)


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks prefill", __doc__)
    made.add_argument("--shapes", nargs="+", default=["llama-2-7b", "llama-3.1-8b"], metavar="SHAPE")
    made.add_argument("--contexts", nargs="+", type=int, default=[122_880], metavar="N")
    made.add_argument("--chunks", nargs="+", type=int, default=[4096, 8192, 16_384], metavar="N")
    made.add_argument(
        "--paths", nargs="+", default=["engine", "eager", "cudnn", "flash-attn-4"], choices=PATHS,
        help="attention and layers; those of flash-attn 4 are left out where it is not installed",
    )  # fmt: skip
    made.add_argument("--runs", type=int, default=1, help="timed prompts of each")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    contexts, chunks = ([384], [128]) if args.tiny else (args.contexts, args.chunks)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    torch.manual_seed(args.seed)
    peak = 0.0 if args.tiny else measure_ceilings().matmul_rate / 1e12
    head = header(args.seed) | {"matmul_tflops": peak}
    path, paths = results_folder(args.out, args.tiny) / PREFILL_FILE, usable(args.paths)
    rows, attention = [], []
    for shape in args.shapes:
        model = HFModel(inflated(TINY_SHAPES[shape] if args.tiny else shape, device, dtype))
        free_memory()
        for context in contexts:
            alone = attention_alone(model.heads, chunks[0], context, paths, device, dtype)
            attention += [{"shape": shape, **row} for row in alone]
            for chunk in chunks:
                # A prompt takes ten seconds, so other paths are measured only with the first chunk size.
                for how in paths if chunk == chunks[0] else paths[:1]:
                    row: Record = {"shape": shape, "context": context, "chunk": chunk}
                    row["path"], row["kernels"] = PATHS[how]
                    row["vocabulary"] = model.vocab_size
                    row |= measure(model, context, chunk, how, args.runs)
                    row["tflops"] = flops(model, context) / row["seconds"] / 1e12
                    row["roofline_share"] = row["tflops"] / peak if peak else None
                    rows.append(row)
                    print(row, flush=True)
                    write(path, head | {"attention": attention, "rows": rows})
        del model
        free_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
