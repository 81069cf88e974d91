"""Check models of real shapes with random weights on a GPU: text, and the time of a token and of a pass.

    python -m scripts.checks.check_shapes --shape gemma-3-12b --prompt 122880
    python -m scripts.checks.check_shapes --shape gemma-3-12b --prompt 122880 --host cache --cap 40
    python -m scripts.checks.check_shapes --shape qwen3-30b-a3b --host weights
    python -m scripts.checks.check_shapes --shape qwen3-next-80b-a3b --layers 8
    python -m scripts.checks.check_shapes --tiny          # on a CPU, the same code

Weights are made on the device, which has to hold all of them once; plain decoding of the whole model there is
the reference. With --host its cache or its weights (of experts first) move to host memory, and the device's
memory is bounded by --cap. Texts must be the reference's, but for ties in 16 bits. Each row has the
milliseconds of a token and of a target pass, the bytes that the pass copied from the host, and the least time
that reading weights and cache, or those copies, take. Exit code 1 where a text differs.
"""

import gc
import statistics
import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from scripts.benchmarks.common.timing import read_bandwidth, timed
from scripts.checks.report import Report, need_gpu, parser
from triforce_tree import Engine, load
from triforce_tree.check.compare import compared, ms_per_token
from triforce_tree.config import load_arguments
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.models.model_copy import weight_bytes
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import GIB, Sizes, tensor_bytes
from triforce_tree.planning.pass_time import pass_tokens

_COMMON: dict[str, Any] = {
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    "max_position_embeddings": 262_144,
}  # fmt: skip
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma-3-12b": (Gemma3TextConfig, {
        "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    }),
    "qwen3-30b-a3b": (Qwen3MoeConfig, {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
    # The configuration's own defaults are the shape of the 80B.
    "qwen3-next-80b-a3b": (Qwen3NextConfig, {"num_hidden_layers": 48}),
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
_TINY_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DRAFT = {
    "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 1024, "head_dim": 128,
}  # fmt: skip
_OPTIONS: dict[str, Any] = {"budget": 1024, "recent": 128}
_TINY_OPTIONS: dict[str, Any] = {"budget": 64, "recent": 16, "chunk": 8, "window": 32}
_REPEATS = 10


def made(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A random model, made on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


def passes(engine: Engine, name: str, prompt: list[int], bandwidth: float) -> dict[str, Any]:
    """Milliseconds of a stage after the text that the engine decoded last, and the least that it can take."""
    hierarchy, streamed = engine.hierarchy, engine.hierarchy.target.streamed
    assert hierarchy._program is not None
    program, times, copied = hierarchy._program[1], [], []
    generator = torch.Generator(program.device).manual_seed(0)
    with hierarchy.active(), program.trial(len(prompt)) as begin:
        for _ in range(_REPEATS):
            begin(True)
            if "draft" in program.stage_names:
                program.run("draft", generator)
            before = streamed.copied if streamed else 0
            times.append(1e3 * timed(program.device, lambda: program.run(name, generator))[1])
            copied.append(streamed.copied - before if streamed else 0)
    took, crossed = statistics.median(times), statistics.median(copied)
    sizes = Sizes.of(hierarchy.target, hierarchy.draft, hierarchy.config)
    tokens = 1 if name == "plain" else pass_tokens(hierarchy.config, program.levels)
    read = weight_bytes(hierarchy.target.model) - sizes.weights + sizes.read_weights(tokens)
    read += sizes.full_layers * sizes.row * len(prompt) + sizes.window_bytes(len(prompt))
    if hierarchy.memory is not None:
        crossed += hierarchy.memory.host.get("KV", 0)
    roof = max(read / bandwidth, crossed / bandwidths(program.device)[0])
    return {"pass_ms": round(took, 2), "copied_gib": round(crossed / GIB, 3), "roof_ms": round(1e3 * roof, 2),
            "of_roofline": round(1e3 * roof / took, 3), "capturable": program.full.capturable}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    command = parser(__doc__)
    add = command.add_argument
    add("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    add("--layers", type=int, help="decoder layers, if not all")
    add("--host", choices=["nothing", "cache", "weights"], default="nothing", help="what is in host memory")
    add("--cap", type=float, default=24.0, help="GiB of device memory, with --host")
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
    kind, shape = SHAPES[args.shape]
    draft_shape, options = _DRAFT, _OPTIONS
    if args.tiny:
        args.layers, args.prompt, dtype = 4, 300, torch.float32
        shape = shape | _TINY | (_TINY_EXPERTS if "num_experts" in shape else {})
        draft_shape, options = _TINY | {"num_hidden_layers": 1}, _TINY_OPTIONS
    config = kind(**_COMMON | shape | ({"num_hidden_layers": args.layers} if args.layers else {}))
    target = made(config, device, dtype, args.seed)
    draft_config = Qwen3Config(**_COMMON | draft_shape | {"vocab_size": config.vocab_size})
    draft = made(draft_config, device, dtype, args.seed + 1)
    generator = torch.Generator().manual_seed(args.seed)
    prompt = torch.randint(config.vocab_size, (args.prompt,), generator=generator).tolist()
    bandwidth = read_bandwidth(device)
    report, weights = Report(), tensor_bytes(target)

    def decoded(engine: Engine) -> GenerateOutput:
        return engine.generate(prompt, max_new_tokens=args.new, do_sample=False)

    whole = load(target, draft, levels=1)
    expected = decoded(whole)
    whole.hierarchy.release()
    del whole
    if args.host != "nothing":
        options = options | {"offload": "auto", "gpu_memory": int(args.cap * GIB)}
        options |= {"offload_weights": True} if args.host == "weights" else {}
    engine = load(target, draft, device=device if args.host == "weights" else None, **load_arguments(options))
    gc.collect()
    if args.host != "nothing":
        bound_memory(device, int(args.cap * GIB))
    for levels in args.levels:
        # One program at a time: the last one's graphs and buffers are free before the next is planned.
        engine.hierarchy.release()
        own = engine.with_options(levels=levels)
        out = decoded(own)
        figures = passes(own, "plain" if levels == 1 else "target", prompt, bandwidth)
        found = compared(own, prompt, out, expected, True)
        figures |= {"ms_per_token": round(ms_per_token(out) or 0.0, 2), "text": found.verdict()}
        plan = own.hierarchy.memory
        figures |= {"resident_experts": plan.resident_experts if plan else None}
        report.add(f"levels={levels}", not found.failed, **figures)
        own.hierarchy.release()
    facts = {"shape": args.shape, "layers": config.num_hidden_layers, "weights_gib": round(weights / GIB, 2)}
    facts |= {"host": args.host, "cap_gib": args.cap if args.host != "nothing" else None}
    facts |= {
        "prompt": args.prompt,
        "dtype": str(dtype),
        "gpu": torch.cuda.get_device_name() if not args.tiny else None,
    }
    return report.finish(**facts)


if __name__ == "__main__":
    sys.exit(main())
