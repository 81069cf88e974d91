"""Compile the few-row linear kernel for Hopper on a machine without a GPU, and say what it uses.

    python tests/linear_compile.py

Run without TRITON_INTERPRET. Besides spills it shows whether the assembler had to wait after every
tensor-core instruction, which only its own remarks tell.
"""

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from triforce_tree.kernels.linear_configs import LinearConfig, choose, row_block
from triforce_tree.kernels.linear_kernel import linear_kernel


def build(
    bits: int, rows: int, config: LinearConfig, dtype: str = "bf16", bias: bool = False, fused: bool = False
):
    """Compile for sm_90 with all sizes multiples of 16."""
    block_m, word = row_block(rows), dtype if bits == 16 else "i16"
    constants = {
        "BITS": bits, "BLOCK_M": block_m, "BLOCK_N": config.block_n, "WIDTH": config.width,
        "SPLIT": config.splits > 1, "STAGES": config.stages, "TMA": config.tma, "FUSED": fused, "ASM": True,
        "PDL": True,
    }  # fmt: skip
    types = {
        "out_ptr": "*" + dtype, "x_ptr": "*" + dtype, "bias_ptr": "*" + dtype, "w_ptr": "*" + word,
        "scales_ptr": "*fp32" if bits == 8 else "*i64", "partial_ptr": "*fp32", "counters_ptr": "*i32",
        "x_view": f"tensordesc<{dtype}[{block_m}, {config.width}]>" if config.tma else "*" + dtype,
        "w_view": f"tensordesc<{word}[{config.block_n}, {config.width}]>" if config.tma else "*" + word,
    }  # fmt: skip
    absent = [name for name, there in (("bias_ptr", bias), ("scales_ptr", bits < 16)) if not there]
    free = ("rows", "splits", "prefetch", "first_1", "first_2", "x_view", "w_view", "w_view_1", "w_view_2")
    names = {name: re.sub(r"_[12]$", "", name) for name in linear_kernel.arg_names}
    constants |= {name: None for name, kind in names.items() if kind in absent}
    signature = {
        name: "constexpr" if name in constants else types.get(kind, "i32") for name, kind in names.items()
    }
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in free and name not in constants
    }
    source = ASTSource(linear_kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.warps})


def said_of(made) -> str:
    """Registers, spills and remarks on serialized products, as the assembler reports them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    slow = "serialized" if "serialized" in said else "overlapped"
    product = "wgmma" if "wgmma.mma_async" in made.asm["ptx"] else "mma"
    size = f"{used[1]} registers, {made.metadata.shared} bytes shared"
    return f"{size}, {product}, {slow}, {spilled[1]} bytes spilled"


def main() -> None:
    for bits in (16, 8, 4):
        for rows in (1, 32, 64, 128):
            config = choose(bits, rows, 4096, 4096)
            sys.stdout.write(f"{bits} bits, {rows} rows: {said_of(build(bits, rows, config))}\n")
        config = choose(bits, 16, 11008, 4096)
        sys.stdout.write(f"{bits} bits, fp16, bias: {said_of(build(bits, 16, config, 'fp16', True))}\n")
        plain = LinearConfig(64, 128, 1, 4, 3, tma=False)
        sys.stdout.write(f"{bits} bits, plain loads: {said_of(build(bits, 16, plain))}\n")
        for tma in (True, False):
            config = LinearConfig(64, 128, 4, 4, 3, tma)
            made = build(bits, 16, config, bias=True, fused=True)
            sys.stdout.write(f"{bits} bits, fused, {'bulk' if tma else 'plain'}: {said_of(made)}\n")


if __name__ == "__main__":
    sys.exit(main())
