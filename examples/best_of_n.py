"""Best of n: draw several texts of one prompt, and keep the one that the target finds most probable by token.

The prompt is stored and read once for all texts. Any other score of a text, such as a reward model's, takes
the place of ``scores``.

    python examples/best_of_n.py [target] [prompt file]
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

import triforce_tree

COUNT, TOKENS = 8, 48

engine = triforce_tree.load(sys.argv[1]) if len(sys.argv) > 1 else triforce_tree.load()
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else topics["booleans"]

out = engine.generate(
    text,
    max_new_tokens=TOKENS,
    num_return_sequences=COUNT,
    temperature=0.8,
    stop_strings=["."],
    logprobs=True,
    seed=1,
)
# The sum of log-probabilities alone would prefer short texts.
scores = out.sequences_scores / torch.tensor(out.new_tokens)
for score, sample in sorted(zip(scores.tolist(), out.text, strict=True), reverse=True):
    print(f"{score:.2f} {sample!r}")
print(f"best of {COUNT}: {out.text[int(scores.argmax())]!r}")
