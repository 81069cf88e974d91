"""File names of published drafting heads, by which their folders are recognised."""

CONFIG = "config.json"
MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
EAGLE = ("model.safetensors", "pytorch_model.bin")


def no_heads(folder: object) -> str:
    """The error about a folder that holds none of these files."""
    return (
        f"{str(folder)!r} holds neither Medusa heads ({' or '.join(MEDUSA)}) nor an EAGLE-3 head "
        f"({' or '.join(EAGLE)}); give the folder of one"
    )
