"""Continue a long text with the embedded pair of models, and print the acceptance at each level."""

from pydoc_data.topics import topics

import triforce_tree

engine = triforce_tree.load()  # or load("path/to/target", "path/to/draft")
text = "\n\n".join(topics[name] for name in sorted(topics))[:40_000]

out = engine.generate(text, max_new_tokens=128, temperature=0.8, top_k=0, seed=1)

print(out.text)
for level in out.levels:
    # Level 0 proposes only, and a level that no pass has used has no rate.
    rate = "" if level.acceptance_rate is None else f", {level.acceptance_rate:.0%} accepted"
    print(f"{level.name}: {level.forwards} passes{rate}")
print(f"{1e3 * out.decode_seconds / out.new_tokens:.1f} ms per token")
