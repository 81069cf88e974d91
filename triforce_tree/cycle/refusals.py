"""What keeps models and settings from the captured cycle."""

from triforce_tree.cycle.growth import MOST_TAIL
from triforce_tree.cycle.shapes import device_shape
from triforce_tree.few_row import why_not_exchanged
from triforce_tree.hf_model import HFModel
from triforce_tree.kernels.configs import choose
from triforce_tree.kernels.device import describe
from triforce_tree.sampling import TokenLaw
from triforce_tree.tree_search import Shape, parse_shape


def why_not_captured(
    target: HFModel, draft: HFModel | None, tree: str | Shape, law: TokenLaw, levels: int
) -> str | None:
    """The first reason, as the end of a sentence; None where there is none.

    Args:
        tree: the shape of level 0's trees, as in ``HierarchyConfig``.
        levels: of 1, draft and tree are not asked.
    """
    if reason := _of_model(target):
        return reason
    for model in (target, draft):
        rope = model.length_rope if model is not None else None
        if rope is not None and rope.waits_for_host and target.device.type == "cuda":
            return f"{rope.name} chooses its rotary frequencies on the host ({rope.kind})"
    if not law.context_free:
        return "a logits processor looks at the tokens so far"
    if levels == 1:
        return None
    if draft is None:
        return "there is no draft model"
    if reason := _of_model(draft):
        return reason
    shape = device_shape(parse_shape(tree))
    if shape is None:
        return f"tree={tree!r} has no fixed size"
    limit = MOST_TAIL - 3
    if sum(shape.widths) + 1 + len(shape.widths) > limit:
        return f"tree={tree!r} is larger than {limit} nodes and depth"
    return None


def _of_model(model: HFModel) -> str | None:
    if reason := why_not_exchanged(model.model):
        return reason
    if model.device.type == "cuda":
        for dim in sorted({shape.heads.dim for shape in model.kv_shapes}):
            try:
                choose(1, dim, model.dtype.itemsize, describe(model.device))
            except ValueError as error:
                return f"no kernel attends for {model.name}: {error}"
    return None
