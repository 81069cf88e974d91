"""Recursive rejection sampling over one token tree, written apart from the package."""

import torch


def _children(parents: list[int], tokens: list[int], node: int) -> list[int]:
    return [i for i, above in enumerate(parents) if above == node and tokens[i] >= 0]


def accept_one_tree(tokens, parents, p, q, q_rows, uniforms, exponential, depth) -> tuple[list[int], int]:
    """Recursive rejection as in SpecInfer and Sequoia, for one tree, in float64.

    Args: those of ``accept_tree`` without the batch. Returns: accepted nodes, and the token after them.
    """
    tokens, parents = tokens.tolist(), parents.tolist()
    path = [0]
    while True:
        node, probs = path[-1], p[path[-1]].double()
        children, rejected = _children(parents, tokens, node) if len(path) <= depth else [], []
        for child in children:
            token, row = tokens[child], int(q_rows[node])
            if token in rejected:
                continue
            certain = row < 0 or int(q_rows[child]) == -2
            # The draft distribution without the rejected tokens.
            draft = torch.ones_like(probs) if certain else q[row].double()
            draft[rejected] = 0.0
            if not certain:
                draft = draft / draft.sum()
            if not draft[token] > 0:
                continue
            if float(uniforms[child]) < float(probs[token] / draft[token]):
                path.append(child)
                break
            rejected.append(token)
            proposal = torch.zeros_like(probs).index_fill(0, torch.tensor(token), 1.0) if certain else draft
            residual = probs - torch.minimum(probs, proposal)
            probs = residual / residual.sum() if residual.sum() > 0 else probs
        else:
            return path, int((probs / exponential).argmax())
