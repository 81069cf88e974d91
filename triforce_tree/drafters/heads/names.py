"""File names of published heads, which identify their kind."""

CONFIG = "config.json"
MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
EAGLE = ("model.safetensors", "pytorch_model.bin")


def no_heads(folder: object) -> str:
    """Returns the error message for a folder that holds none of these files."""
    return (
        f"{str(folder)!r} holds neither Medusa heads ({' or '.join(MEDUSA)}) nor an EAGLE-3 head "
        f"({' or '.join(EAGLE)}); give the folder of one"
    )
