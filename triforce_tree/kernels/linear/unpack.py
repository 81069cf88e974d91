"""Converts packed integers exactly to bf16 or fp16 in registers, by bit operations on the float format.

A float that is a power of two with a code in its low mantissa bits has the value of the power plus the code.
So an ``and``, an ``or`` and one subtraction make two floats. ``ASM`` selects the instructions: "sub" for the
assembly below, "fma" for GPUs before sm_90, which lack ``sub.bf16x2``, and "none" for plain Triton
(interpreter and AMD).
"""

import re

import triton
import triton.language as tl


def _nibbles(kind: str, magic: int, offset: int) -> str:
    """Returns the assembly for four planes of 4-bit codes; ``magic`` and ``offset`` hold two floats each."""
    lines = [
        f"shr.u32 t, $4, {4 * p}; lop3.b32 ${p}, t, 0x000f000f, m, 0xea; sub.{kind} ${p}, ${p}, o;"
        for p in range(4)
    ]
    start = f".reg .b32 t, m, o; mov.b32 m, {magic:#x}; mov.b32 o, {offset:#x};"
    return "{" + start + " ".join(lines) + "}"


# A bf16 mantissa has 7 bits, so the sign bit of a byte chooses whether 128 or 256 is subtracted.
_BYTES_BF16 = """{
    .reg .b32 s, t, m;
    mov.b32 m, 0x43004300;
    lop3.b32 $0, $2, 0x007f007f, m, 0xea;
    lop3.b32 s, $2, 0x00800080, m, 0xea;
    sub.bf16x2 $0, $0, s;
    shr.u32 t, $2, 8;
    lop3.b32 $1, t, 0x007f007f, m, 0xea;
    lop3.b32 s, t, 0x00800080, m, 0xea;
    sub.bf16x2 $1, $1, s;
}"""
# An fp16 mantissa holds the whole byte, which flipping its sign bit makes unsigned.
_BYTES_FP16 = """{
    .reg .b32 t, m;
    mov.b32 m, 0x64806480;
    lop3.b32 $0, $2, 0x00ff00ff, m, 0x6a;
    sub.f16x2 $0, $0, m;
    shr.u32 t, $2, 8;
    lop3.b32 $1, t, 0x00ff00ff, m, 0x6a;
    sub.f16x2 $1, $1, m;
}"""


def _by_fma(text: str) -> str:
    """Returns the assembly with ``a - b`` replaced by ``fma(b, -1, a)``, which is also exact."""
    text = re.sub(r"sub\.bf16x2 (\S+), \S+, (\S+);", r"fma.rn.bf16x2 \1, \2, n, \1;", text)
    return text.replace("{", "{ .reg .b32 n; mov.b32 n, 0xbf80bf80; ", 1)


BYTES_BF16, BYTES_FP16 = tl.constexpr(_BYTES_BF16), tl.constexpr(_BYTES_FP16)
BYTES_BF16_FMA = tl.constexpr(_by_fma(_BYTES_BF16))
NIBBLES_BF16 = tl.constexpr(_nibbles("bf16x2", 0x43004300, 0x43084308))
NIBBLES_BF16_FMA = tl.constexpr(_by_fma(_nibbles("bf16x2", 0x43004300, 0x43084308)))
NIBBLES_FP16 = tl.constexpr(_nibbles("f16x2", 0x64006400, 0x64086408))


@triton.jit
def _plane(words, P: tl.constexpr, BITS: tl.constexpr, Kind: tl.constexpr):
    codes = (words.to(tl.int32) >> (BITS * P)) & ((1 << BITS) - 1)
    if BITS == 8:
        codes = (codes ^ 128) - 128
    else:
        codes = codes - 8
    return codes.to(tl.float32).to(Kind)


@triton.jit
def two_planes(words, Kind: tl.constexpr, ASM: tl.constexpr):
    if ASM == "none":
        return _plane(words, 0, 8, Kind), _plane(words, 1, 8, Kind)
    elif Kind == tl.bfloat16:
        text: tl.constexpr = BYTES_BF16 if ASM == "sub" else BYTES_BF16_FMA
        return tl.inline_asm_elementwise(
            text, "=&r,=&r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            BYTES_FP16, "=&r,=&r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def four_planes(words, Kind: tl.constexpr, ASM: tl.constexpr):
    if ASM == "none":
        return (
            _plane(words, 0, 4, Kind), _plane(words, 1, 4, Kind),
            _plane(words, 2, 4, Kind), _plane(words, 3, 4, Kind),
        )  # fmt: skip
    elif Kind == tl.bfloat16:
        text: tl.constexpr = NIBBLES_BF16 if ASM == "sub" else NIBBLES_BF16_FMA
        return tl.inline_asm_elementwise(
            text, "=&r,=&r,=&r,=&r,r", [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            NIBBLES_FP16, "=&r,=&r,=&r,=&r,r", [words],
            (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
