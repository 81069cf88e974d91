"""Compile the Triton kernels for Hopper on a machine without a GPU, and say what they use.

    python tests/kernels_compile.py

The interpreter runs Python, so it misses what only the compiler sees: types of loop-carried
variables, operands that do not fit, spilled registers. Run without TRITON_INTERPRET.
"""

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from triforce_tree.kernels import combine, compaction, merge, scoring
from triforce_tree.kernels.configs import EDGE, choose
from triforce_tree.kernels.tree_attention import tree_attention_kernel

_TENSORS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "outs_ptr", "means_ptr", "rows_ptr")
_FLOATS = ("partial_out_ptr", "partial_lse_ptr", "lse_ptr", "lses_ptr", "total_ptr", "sinks_ptr")


def build(kernel, constants: dict, warps: int, dtype: str = "bf16", tile: str = ""):
    """Compile one kernel for sm_90; ``tile`` is what descriptors load, as Triton spells it."""
    signature, attributes, dtype_at = {}, {}, "*" + dtype
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("k_rows", "v_rows"):
            signature[name] = f"tensordesc<{tile}>" if tile else dtype_at
        elif name in _TENSORS:
            signature[name] = dtype_at
        elif name in _FLOATS:
            signature[name] = "*fp64" if name == "partial_lse_ptr" and constants["EXACT"] else "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
        if name.endswith("_ptr") or name.startswith("stride"):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def attention(rows: int, dim: int = 128, page: int = 0, tma: bool = True, **flags):
    """The main kernel in its configuration for so many packed rows."""
    exact = flags.get("EXACT", False)
    config = choose(rows, dim, 4 if exact else 2)
    constants = {
        "GROUP": 4, "KV_HEADS": 8, "DIM": dim, "BLOCK_D": dim, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "EDGE": EDGE, "SINGLE": True, "BLOCK_SEGMENTS": 1, "PAGE": page,
        "TMA": tma, "WINDOW": False, "SOFTCAP": False, "NODE": False, "EXACT": False,
        "STAGES": config.stages, "EDGE_STAGES": config.edge_stages, "ALIGN": config.align,
        "PDL": True,
    } | flags  # fmt: skip
    if not constants["WINDOW"]:
        constants |= {"first_ptr": None, "low_ptr": None, "high_ptr": None}
    tile = f"bf16[{config.block_n}, {dim}]" if tma else ""
    return build(tree_attention_kernel, constants, config.warps, "fp32" if exact else "bf16", tile)


def merging(**flags):
    """The combine kernel."""
    constants = {
        "GROUP": 4, "KV_HEADS": 8, "DIM": 128, "BLOCK_D": 128, "SINGLE": True, "CHUNK": 16,
        "BLOCK_N": 64, "EDGE": EDGE, "ALIGN": 16, "WINDOW": False, "CUT": True, "SINKS": False,
        "EXACT": False, "PDL": True,
    } | flags  # fmt: skip
    if not constants["WINDOW"]:
        constants |= {"low_ptr": None, "high_ptr": None}
    if not constants["SINKS"]:
        constants["sinks_ptr"] = None
    return build(combine.combine_kernel, constants, 1, "fp32" if constants["EXACT"] else "bf16")


def companions():
    """Merge, scoring, gather and compaction."""
    tile = {"DIM": 128, "BLOCK_D": 128, "BLOCK_M": 64, "BLOCK": 64, "PRECISION": "tf32"}
    yield (
        "merge",
        build(merge._merge_kernel, {"PARTS": 3, "DIM": 128, "BLOCK_D": 128, "BLOCK": 4}, 4),
    )
    yield "scores", build(scoring._lse_kernel, tile, 4)
    yield "interest", build(scoring._interest_kernel, tile, 4)
    yield "gather", build(compaction._gather_kernel, {"DIM": 128, "BLOCK_D": 128, "BLOCK": 32}, 4)
    shape = {"DIM": 128, "BLOCK_R": 64, "BLOCK_D": 128}
    yield "compact", build(compaction._compact_kernel, shape, 4)


def registers(made) -> str:
    """Registers and spills, as ptxas reports them."""
    assembler = get_ptxas(90).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return f"{used[1]} registers, {spilled[1]} bytes spilled, {made.metadata.shared} bytes shared"


def main() -> None:
    variants = {
        "16 rows": lambda: attention(4),
        "64 rows": lambda: attention(64),
        "64 rows, pages of 128": lambda: attention(64, page=128),
        "64 rows, pages of 16, window, softcap": lambda: attention(
            64, page=16, tma=False, WINDOW=True, SOFTCAP=True
        ),
        "ragged batch": lambda: attention(64, SINGLE=False, BLOCK_SEGMENTS=8, WINDOW=True),
        "node": lambda: attention(16, SINGLE=False, BLOCK_SEGMENTS=64, NODE=True),
        "head_dim 64": lambda: attention(64, 64),
        "head_dim 256": lambda: attention(64, 256),
        "fp32": lambda: attention(64, tma=False, EXACT=True),
        "fp32, head_dim 256, window, softcap": lambda: attention(
            64, 256, tma=False, EXACT=True, WINDOW=True, SOFTCAP=True
        ),
        "combine": merging,
        "combine, fp32": lambda: merging(EXACT=True, SINKS=True),
        "combine, window, sinks": lambda: merging(WINDOW=True, SINKS=True),
        "combine, many segments": lambda: merging(SINGLE=False, CUT=False),
    }
    for name, make in variants.items():
        sys.stdout.write(f"{name}: {registers(make())}\n")
    for name, made in companions():
        sys.stdout.write(f"{name}: {registers(made)}\n")


if __name__ == "__main__":
    sys.exit(main())
