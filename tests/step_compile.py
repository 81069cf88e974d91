"""Compile the kernels of the decoding cycle for Hopper on a machine without a GPU; say what they use.

    python tests/step_compile.py

See ``kernels_compile``, whose report this shares. Run without TRITON_INTERPRET.
"""

import sys

import triton
from kernels_compile import registers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triforce_tree.kernels import accept, grow, rows, select

_BF16 = {"k_cache_ptr", "v_cache_ptr", "k_ptr", "v_ptr", "rows_ptr", "means_ptr", "q_ptr", "logits_ptr"}
_FP32 = {"score_ptr", "top_ptr", "mass_ptr", "lse_ptr", "p_ptr", "uniforms_ptr", "race_ptr", "laws_ptr"}
_FP32 |= {"temperature_ptr", "ranks_ptr", "values_ptr"}
_INT32 = {"table_ptr", "key_ptr", "gone_ptr", "lengths_ptr"}


def build(kernel, constants: dict, warps: int, **types: str):
    """One kernel for sm_90; pointers that no set above names are int64."""
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        elif name.endswith("_ptr"):
            kind = "bf16" if name in _BF16 else "fp32" if name in _FP32 else "i32"
            signature[name] = "*" + (kind if name in _BF16 | _FP32 | _INT32 else "i64")
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        # Strides, and most sizes, are multiples of 16.
        sized = name.endswith("_ptr") or "_" in name or name in ("chunks", "vocab")
        if sized and signature[name] != "constexpr":
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def variants():
    """Name, kernel, constants, warps, other pointer types."""
    row = {"DIM": 128, "BLOCK_D": 128}
    yield "append", rows._append_kernel, row | {"BLOCK_T": 32}, 4, {}
    for places in (32, 128):
        yield f"move {places}", rows._move_kernel, row | {"BLOCK_R": places, "BLOCK_D": 8192 // 128}, 4, {}
    yield "means", rows._means_kernel, row | {"CHUNK": 8, "BLOCK_C": 16}, 4, {}
    for group in (1, 4):
        tile = {"GROUP": group, "BLOCK": 64}
        yield f"scores, group {group}", select._score_kernel, row | tile, 4, {}
        for block, held in ((4096, True), (16384, True), (8192, False)):
            tile = {"GROUP": group, "HELD": held, "BLOCK": block, "PART": 64, "BLOCK_PARTS": 256}
            name = f"choice of {block}{'' if held else ' and more'}, group {group}"
            yield name, select._choose_kernel, tile, max(4, min(16, block // 512)), {}
    for nodes, block in ((16, 4096), (256, 4096), (16, 256)):
        tile = {"BLOCK_N": nodes, "BLOCK_V": block}
        yield f"judge {nodes} nodes", accept._judge_kernel, tile, block // 256, {"q_ptr": "*fp32"}
    tile = {"BLOCK_N": 64, "BLOCK_P": 16}
    yield "follow", accept._follow_kernel, tile, 1, {}
    yield "greedy", accept._greedy_kernel, tile, 1, {}
    yield "second", accept._second_kernel, {"BLOCK": 4096}, 16, {}
    yield "second, greedy", accept._second_kernel, {"BLOCK": 4096, "race_ptr": None}, 16, {}
    yield "begin", grow._begin_kernel, {"BLOCK_C": 32, "BLOCK_D": 4}, 1, {}
    for block, most in ((4096, 8), (4096, 1), (8192, 16)):
        tile = {"BLOCK": block, "BLOCK_K": most}
        yield f"expand {block}, {most} draws", grow._expand_kernel, tile, block // grow._WARP, {}
        tile |= {"temperature_ptr": None, "race_ptr": None}
        yield f"expand {block}, {most} best", grow._expand_kernel, tile, block // grow._WARP, {}
    for block in (1, 64, 2048):
        tile = {"BLOCK": block, "pairs_ptr": None}
        yield f"place of {block}", grow._place_kernel, tile, max(1, block // 256), {}
    tile = {"BLOCK": 8, "ranks_ptr": None, "mask_ptr": None}
    yield "place, fixed", grow._place_kernel, tile, 1, {}


def main() -> None:
    for name, kernel, constants, warps, types in variants():
        sys.stdout.write(f"{name}: {registers(build(kernel, constants, warps, **types))}\n")


if __name__ == "__main__":
    sys.exit(main())
