"""Monte Carlo tree search over a text: select by upper confidence bounds, expand, roll out, back up.

The value of a text is the mean log-probability that the model gives to its rollout; a real use would ask a
verifier. Nodes of the search are nodes of the tree, so that their keys and values are computed once, however
often the search comes back to them, and rollouts are pruned as soon as they are scored.

    python examples/mcts.py [target] [prompt file]
"""

import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import triforce_tree

SIMULATIONS, CHILDREN, STEP_TOKENS, ROLLOUT_TOKENS, EXPLORATION = 12, 3, 8, 12, 0.5

engine = triforce_tree.load(sys.argv[1]) if len(sys.argv) > 1 else triforce_tree.load()
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else topics["while"] + topics["for"]
tree = engine.tree(text)
visits, total = {tree.root: 0}, {tree.root: 0.0}


def bound(node):
    """UCT (Kocsis and Szepesvari, 2006): the mean value, and a bonus for nodes that were tried rarely."""
    if not visits[node]:
        return math.inf
    return total[node] / visits[node] + EXPLORATION * math.sqrt(math.log(visits[node.parent]) / visits[node])


def expand(node, seed):
    """Gives a node its children: that many different continuations, decoded together."""
    for child in tree.fork(node, CHILDREN):
        visits[child], total[child] = 0, 0.0
    tree.generate(node.children, max_new_tokens=STEP_TOKENS, temperature=1.0, seed=seed)


def rollout(nodes, seed):
    """Values of texts: each is continued once, all together, and the continuations are forgotten."""
    leaves = [tree.fork(node, 1)[0] for node in nodes]
    branches = tree.generate(leaves, max_new_tokens=ROLLOUT_TOKENS, temperature=0.7, seed=seed)
    for leaf in leaves:
        tree.prune(leaf)
    return [sum(branch.logprobs) / len(branch.logprobs) for branch in branches]


for simulation in range(SIMULATIONS):
    node = tree.root
    while node.children:
        node = max(node.children, key=bound)
    expand(node, seed=simulation)
    for child, value in zip(node.children, rollout(node.children, seed=1000 + simulation), strict=True):
        for above in child.path:
            visits[above] += 1
            total[above] += value

best = tree.root
while best.children:
    best = max(best.children, key=visits.get)
print(f"{len(visits)} nodes, {tree.used_bytes / 2**20:.1f} MiB of keys and values")
print(f"most visited, mean value {total[best] / visits[best]:.2f}:", repr(tree.text(best)[len(text) :]))
