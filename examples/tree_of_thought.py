"""Tree of thought (Yao et al., arXiv 2305.10601): propose several next steps, keep the best, go on from them.

A step is a few tokens, and its value the mean log-probability of an answer to a question after it, which the
model gives itself. The prompt and every step are stored once, and all steps of a round are decoded together.
At the end self-consistency (Wang et al., arXiv 2203.11171) draws several answers after the best steps, and
counts them.

    python examples/tree_of_thought.py [target] [prompt file]
"""

import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import triforce_tree

STEPS, WIDTH, KEPT = 3, 4, 2  # rounds; steps proposed after each text, texts kept after each round
STEP_TOKENS, ANSWER_TOKENS, ANSWERS = 16, 1, 16

engine = triforce_tree.load(sys.argv[1]) if len(sys.argv) > 1 else triforce_tree.load()
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else topics["booleans"] + topics["if"]
QUESTION, ANSWER = "\n\nThe statement is", " an expression"

tree = engine.tree(text)
texts = [tree.root]
for step in range(STEPS):
    thoughts = [child for node in texts for child in tree.fork(node, WIDTH)]
    tree.generate(thoughts, max_new_tokens=STEP_TOKENS, temperature=0.8, seed=step)

    # The value of a step: the question below it and the answer below that, scored for all steps at once.
    answers = []
    for thought in thoughts:
        question = tree.extend(tree.fork(thought, 1)[0], QUESTION)
        answers.append(tree.extend(tree.fork(question, 1)[0], ANSWER))
    values = {thought: float(s.mean()) for thought, s in zip(thoughts, tree.score(answers), strict=True)}

    texts = sorted(thoughts, key=values.get, reverse=True)[:KEPT]
    for thought in thoughts:
        for node in [*thought.children] if thought in texts else [thought]:
            tree.prune(node)  # its keys and values are free for the next round
    print(f"round {step + 1}: best value {values[texts[0]]:.2f}, {tree.used_bytes / 2**20:.1f} MiB in use")

asked = [tree.extend(node, QUESTION) for node in tree.fork(texts[0], 1)]
branches = tree.generate(
    tree.fork(asked[0], ANSWERS), max_new_tokens=ANSWER_TOKENS, temperature=0.7, seed=STEPS
)
votes = Counter(branch.text for branch in branches)
print(f"{ANSWERS} answers: {votes.most_common(3)}")
print("steps:", repr(tree.text(texts[0])[len(text) :]))
