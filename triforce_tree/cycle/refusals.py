"""What keeps the full KV cache of a model from host memory."""

from triforce_tree.hf_model import HFModel


def why_not_offloaded(target: HFModel) -> str | None:
    """The reason, as the end of a sentence; None where there is none."""
    if target.has_windows:
        return f"{target.name} has sliding windows"
    if not target.even_heads:
        return f"the layers of {target.name} have keys of different shapes"
    return None
