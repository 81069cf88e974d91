"""Check a mixture of experts in host memory on a GPU: text, bytes that cross the bus, time of a pass.

    python -m scripts.checks.check_experts                            # Qwen3-30B-A3B's shape, 24 GiB, bf16
    python -m scripts.checks.check_experts --layers 4 --dtype float32 --levels 1 2 3   # greedy text, exactly
    python -m scripts.checks.check_experts --tiny                     # on a CPU, the same code

Weights are random and made on the device, which has to hold all of them once (61 GB with 48 layers); plain
decoding of the whole model on the device is the reference. Then experts move to host memory, and the device's
memory is bounded by --cap. In fp32 the text of every level must be the reference's, in 16 bits that of plain
decoding: passes over several tokens round otherwise. Each row has the milliseconds of a token and of a pass,
the bytes that the pass copied, and the least time that the bus takes for those. Exit code 1 where a text
differs.
"""

import gc
import statistics
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from scripts.benchmarks.common.timing import synchronize
from scripts.checks.report import Report, need_gpu, parser
from triforce_tree import Engine, load
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import GIB, tensor_bytes

_COMMON: dict[str, Any] = {
    "head_dim": 128, "max_position_embeddings": 40_960, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_SHAPE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_DRAFT = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 1024}
_TINY_DRAFT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_OPTIONS: dict[str, Any] = {"tree": "best-first:8,6,4", "budget": 1024, "recent": 128}
_TINY_OPTIONS: dict[str, Any] = _OPTIONS | {"budget": 64, "recent": 16, "chunk": 8, "window": 32}
_REPEATS = 10


def made(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A random model, made on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


def text(engine: Engine, prompt: list[int], new: int) -> tuple[list[int], float]:
    """Greedy tokens, and milliseconds of each."""
    out = engine.generate(prompt, max_new_tokens=new, temperature=0)
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    return tokens, round(1e3 * (out.decode_seconds or 0.0) / new, 2)


def passes(engine: Engine, name: str, prompt: list[int]) -> dict[str, Any]:
    """Milliseconds of a stage, after the text that the engine decoded last, and the bytes that it copies."""
    hierarchy, streamed = engine.hierarchy, engine.hierarchy.target.streamed
    assert hierarchy._program is not None
    assert streamed is not None
    program, times, copied = hierarchy._program[1], [], []
    generator = torch.Generator(program.device).manual_seed(0)
    with hierarchy.active(), program.trial(len(prompt)) as begin:
        for _ in range(_REPEATS):
            begin()
            if "draft" in program.stage_names:
                program.run("draft", generator)
            # Reading the counter waits for the device.
            before, start = streamed.copied, time.perf_counter()
            program.run(name, generator)
            synchronize(program.device)
            times.append(1e3 * (time.perf_counter() - start))
            copied.append(streamed.copied - before)
    size, took = statistics.median(copied), statistics.median(times)
    bus = 1e3 * size / bandwidths(program.device)[0]
    return {"ms": round(took, 2), "copied_gib": round(size / GIB, 3), "bus_ms": round(bus, 2),
            "of_roofline": round(bus / took, 3)}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    command = parser(__doc__)
    add = command.add_argument
    add("--layers", type=int, default=48, help="decoder layers; Qwen3-30B-A3B has 48")
    add("--cap", type=float, default=24.0, help="GiB of device memory once experts are in host memory")
    add("--prompt", type=int, default=4096, help="tokens")
    add("--new", type=int, default=48, help="tokens to decode")
    add("--levels", type=int, nargs="+", default=[1, 2], choices=[1, 2, 3], help="levels to check")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of all weights")
    add("--seed", type=int, default=0, help="of all weights and of the prompt")
    add("--tiny", action="store_true", help="tiny models, on any machine")
    args = command.parse_args(arguments)
    if not args.tiny:
        need_gpu(command)
    device, dtype = torch.device("cpu" if args.tiny else "cuda"), getattr(torch, args.dtype)
    if args.tiny:
        args.layers, args.prompt, dtype = 3, 300, torch.float32
    shape, draft_shape = (_TINY, _TINY_DRAFT) if args.tiny else (_SHAPE, _DRAFT)
    options = _TINY_OPTIONS if args.tiny else _OPTIONS
    config = Qwen3MoeConfig(**_COMMON | {"num_hidden_layers": args.layers} | shape)
    target = made(config, device, dtype, args.seed)
    draft_shape = {"vocab_size": shape["vocab_size"], "num_key_value_heads": 2} | draft_shape
    draft = made(Qwen3Config(**_COMMON | draft_shape), device, dtype, args.seed + 1)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(shape["vocab_size"], (args.prompt,), generator=generator).tolist()
    report = Report()
    whole = load(target, draft, profile=False, levels=1)
    expected, _ = text(whole, ids, args.new)
    whole.hierarchy.release()
    del whole
    weights = tensor_bytes(target)
    engine = load(
        target, draft, profile=False, device=device, offload="auto", offload_weights=True,
        gpu_memory=int(args.cap * GIB), **options,
    )  # fmt: skip
    gc.collect()
    bound_memory(device, int(args.cap * GIB))
    for levels in args.levels:
        # One program at a time: the last one's graphs and buffers are free before the next is planned.
        engine.hierarchy.release()
        own = engine.with_options(levels=levels)
        new, ms_per_token = text(own, ids, args.new)
        plan = own.hierarchy.memory
        exact = dtype == torch.float32 or levels == 1
        figures = passes(own, "plain" if levels == 1 else "target", ids)
        figures |= {"same_text": new == expected, "ms_per_token": ms_per_token}
        figures |= {"captured": own.hierarchy._program[1].full.capturable if own.hierarchy._program else None}
        figures |= {"resident_experts": plan.resident_experts if plan else None}
        figures |= {"planned_ms": round(1e3 * plan.pass_seconds, 2) if plan else None}
        report.add(f"levels={levels}", new == expected or not exact, **figures)
        own.hierarchy.release()
    facts = {"layers": args.layers, "weights_gib": round(weights / GIB, 2), "cap_gib": args.cap}
    facts |= {"bus_gbps": round(bandwidths(device)[0] / 1e9, 1), "prompt": args.prompt, "dtype": str(dtype)}
    return report.finish(**facts)


if __name__ == "__main__":
    sys.exit(main())
