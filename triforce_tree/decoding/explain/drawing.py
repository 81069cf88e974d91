"""A drafted token tree as text, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from triforce_tree.decoding.explain.tally import Node


def as_lines(tree: Sequence[Node], words: Sequence[str]) -> list[str]:
    """One line for each node, below its parent; accepted nodes are marked."""
    children: dict[int, list[int]] = {}
    for number, node in enumerate(tree):
        children.setdefault(node.parent, []).append(number)
    lines: list[str] = []

    def add(number: int, indent: str, last: bool) -> None:
        node = tree[number]
        branch = "" if node.parent < 0 else indent + ("└─ " if last else "├─ ")
        shown = f"{words[number]!r}" + ("" if node.parent < 0 else f"  {node.probability:.2f}")
        lines.append(f"{branch}{shown}{'  accepted' if node.accepted and node.parent >= 0 else ''}")
        below = children.get(number, [])
        inner = "" if node.parent < 0 else indent + ("   " if last else "│  ")
        for child in below:
            add(child, inner, child == below[-1])

    if tree:
        add(0, "", True)
    return lines


def draw(tree: Sequence[Node], words: Sequence[str], path: Path) -> None:
    """Write the tree as a picture; its format is that of the file's name.

    Raises:
        ValueError: there is no tree, or matplotlib is not installed.
    """
    if not tree:
        raise ValueError("no tree was drafted, so that there is nothing to draw; leave --png out")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing a tree needs matplotlib: pip install 'triforce-tree[plot]'") from error
    depths = [0]
    for node in tree[1:]:
        depths.append(depths[node.parent] + 1)
    widest = max(depths.count(depth) for depth in set(depths))
    figure = Figure(figsize=(max(4.0, 1.1 * widest), 1.2 * (max(depths) + 1)))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, 1), ylim=(-max(depths) - 0.5, 0.5))
    axes.set_axis_off()
    across: dict[int, float] = {}
    for depth in set(depths):
        at = [number for number, own in enumerate(depths) if own == depth]
        across |= {number: (place + 1) / (len(at) + 1) for place, number in enumerate(at)}
    for number, node in enumerate(tree):
        colour = "tab:green" if node.accepted else "tab:gray"
        if node.parent >= 0:
            ends = [across[node.parent], across[number]], [-depths[node.parent], -depths[number]]
            axes.plot(*ends, color=colour, linewidth=2.0 if node.accepted else 0.8, zorder=1)
        label = repr(words[number])[1:-1] + ("" if node.parent < 0 else f"\n{node.probability:.2f}")
        # A dollar sign would begin a formula.
        axes.text(
            across[number],
            -depths[number],
            label.replace("$", r"\$"),
            ha="center",
            va="center",
            fontsize=8,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": colour},
        )
    figure.savefig(path, dpi=150)
