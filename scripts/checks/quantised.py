"""Check a quantised target at real size: text, CUDA graphs, memory, and the time of a token and of a pass.

    python -m scripts.checks.quantised --method bnb4 --shape llama-3.1-8b --kv-bits 8 --memory 24GiB
    python -m scripts.checks.quantised --method int8 --device cpu --shape tiny --context 600 --new 12

The embedded pair is inflated to the shape and its target's layers are quantised in place, so that drafts are
accepted as they are by a trained model. Text of three levels is compared with plain decoding of the same
quantised target. Exit code 1 where it differs by more than ties of 16 bits; the last line is JSON.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from scripts.checks.report import Report, parser
from scripts.inflate.pair import inflate_pair
from triforce_tree import load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.check.compare import compared, ms_per_token
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer
from triforce_tree.memory_size import bytes_of
from triforce_tree.planning.machine import bound_memory
from triforce_tree.runtime.executor import free_memory

TINY = "tiny"


def _bitsandbytes(bits: int) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        sizes = (linear.in_features, linear.out_features)
        weight, device = linear.weight.data, linear.weight.device
        if bits == 4:
            made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
            made.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
        else:
            made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
            made.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        return made.to(device).eval()

    return make


def _torchao(name: str, **settings: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        import torchao.quantization as torchao

        torchao.quantize_(linear, getattr(torchao, name)(**settings))
        return linear

    return make


METHODS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bnb4": _bitsandbytes(4),
    "bnb8": _bitsandbytes(8),
    "int8": _torchao("Int8WeightOnlyConfig"),
    "int4": _torchao("Int4WeightOnlyConfig", group_size=128),
    "float8": _torchao("Float8WeightOnlyConfig"),
    "float8-inputs": _torchao("Float8DynamicActivationFloat8WeightConfig"),
}


def quantise(model: PreTrainedModel, method: str) -> None:
    """Quantise the linear layers of the decoder layers in place, one by one."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, METHODS[method](child))
    model.is_quantized = True
    free_memory()


def pair(shape: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    if shape != TINY:
        return inflate_pair(shape, device, torch.bfloat16)
    models = (load_model(PAIR / name, device, torch.float32) for name in ("target", "draft"))
    return (*models, load_tokenizer(PAIR / "target"))  # type: ignore[return-value]


def times(out: GenerateOutput) -> dict[str, float]:
    """Milliseconds of a token, and of a pass of the target."""
    assert out.levels is not None
    target = out.levels[-1]
    pass_ms = 1000 * target.seconds / max(1, target.forwards)
    return {"ms_a_token": round(ms_per_token(out) or 0.0, 3), "ms_a_target_pass": round(pass_ms, 3)}


def main(words: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--method", choices=METHODS, default="bnb4")
    made.add_argument("--shape", default="llama-3.1-8b", help="of the target, or tiny: the pair as it is")
    made.add_argument("--context", type=int, default=122_880)
    made.add_argument("--new", type=int, default=128)
    made.add_argument("--kv-bits", type=int, default=16, choices=(8, 16), help="of keys and values")
    made.add_argument("--memory", help="limit of the GPU's memory, as in 24GiB")
    made.add_argument("--device", default="cuda")
    args = made.parse_args(words)
    device, report = torch.device(args.device), Report()
    on_gpu = device.type == "cuda"
    target, draft, tokenizer = pair(args.shape, device)
    quantise(target, args.method)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        if args.memory:
            # Only now: the plain weights were larger.
            bound_memory(device, bytes_of(args.memory, "--memory"))
    text = token_ids(tokenizer, pydoc_text())
    prompt = (text * -(-args.context // len(text)))[: args.context]
    engine = load(target, draft, tokenizer=tokenizer, levels=3, kv_bits=args.kv_bits)
    asked: dict[str, Any] = {"max_new_tokens": args.new, "do_sample": False}
    out = engine.generate(prompt, **asked)
    captured = engine.hierarchy.target.capturable
    plain = engine.with_options(levels=1).generate(prompt, **asked)
    found = compared(engine, prompt, out, plain, True)
    report.add("text", not found.failed, verdict=found.verdict(), identical=found.identical)
    report.add("accepted", sum(level.accepted for level in out.levels or []) > 0)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    if args.memory and on_gpu:
        report.add("memory", peak is not None and peak <= bytes_of(args.memory, "--memory") / 2**30)
    return report.finish(
        method=args.method,
        shape=args.shape,
        context=args.context,
        kv_bits=args.kv_bits,
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        captured=captured,
        three_levels=times(out),
        plain=times(plain),
        peak_gib=peak and round(peak, 2),
    )


if __name__ == "__main__":
    sys.exit(main())
