"""Speed by position in texts of thousands of new tokens: docs/results/long_outputs_MACHINE.jsonl.

    python -m scripts.benchmarks long_outputs --texts texts.json.xz --kinds prose code
    python -m scripts.benchmarks long_outputs --shapes pair --contexts 2048 --new-tokens 4096

Default settings; one text of each kind. Figures are those of bins of new tokens: milliseconds a token, tokens
a pass, the shares of passes by their levels, and the share of repeated 8-grams, since a text that repeats
itself is easy to draft. Plain decoding continues the same text in the middle of each bin, from the same keys
and values, for a few tokens, since its time changes slowly. The same command goes on where the last one
ended. ``peers --contexts`` with the tokens of prompt and text together measures other engines there.
"""

from collections.abc import Sequence
from dataclasses import replace

from scripts.benchmarks.texts.command import (
    SHAPES,
    device_for_shapes,
    files_by_shape,
    found_texts,
    grid_parser,
    measure_grid,
    parsed,
)
from scripts.benchmarks.texts.grid import GridRun, TimeLimit
from scripts.benchmarks.texts.positions import position_rows

NAME = "long_outputs"
CONTEXTS = (2048, 32_768)


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser(NAME, __doc__, CONTEXTS, SHAPES, ["7b", "8b"])
    made.add_argument("--bin", type=int, default=1024, help="new tokens whose figures are put together")
    made.set_defaults(temperatures=[0.6, 1.0], seeds=1, new_tokens=16_384, plain_tokens=32)
    args = parsed(made, words)
    if not 2 * args.plain_tokens <= args.bin <= args.new_tokens or args.new_tokens % args.bin:
        made.error("--bin must divide --new-tokens, and have room for --plain-tokens in its second half")
    device = device_for_shapes(made, args)
    limit = TimeLimit(args.seconds)
    texts, sources, missing = found_texts(made, args, one_a_kind=True)
    for grid, file in files_by_shape(args, NAME, device, sources, position_rows):
        binned = replace(grid, bin_tokens=args.bin)
        if not measure_grid(GridRun(binned, file, texts, device, limit, args.seed), missing):
            return 3
    return 0
