"""One model in several formats, so that each engine reads one that it knows.

All are made from one GGUF file: a folder in safetensors with its unpacked weights, and GGUF files of other
types with the same weights, rounded.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from triforce_tree.loading.checkpoints import load_model, load_tokenizer
from triforce_tree.loading.gguf_header import is_gguf

# Formats of a folder: torch's name of the dtype.
FOLDERS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Types of GGUF files that can be made, with ``general.file_type``.
FILES = {"F32": 0, "F16": 1, "Q8_0": 7}
# The file itself.
OWN = "own"


@dataclass(frozen=True)
class Checkpoint:
    """A model in one format.

    Attributes:
        format: such as "bf16" or "Q4_1".
        bits: of its weights, by which checkpoints are compared.
        target: its folder or file.
        dtype: of a folder's weights as they are used.
    """

    format: str
    bits: int
    target: str
    dtype: str | None = None


def checkpoint(target: str, name: str, models: Path) -> Checkpoint:
    """Returns the model in a format; one that is not there is made in the folder ``models``.

    Args:
        target: a GGUF file, or a folder, of which only the formats of folders can be had.
        name: one of ``FOLDERS``, ``FILES`` or ``OWN``.

    Raises:
        ValueError: the format cannot be made.
    """
    if name in FOLDERS:
        folder = _folder(target, models) if is_gguf(target) else Path(target)
        return Checkpoint(name, torch.finfo(getattr(torch, FOLDERS[name])).bits, str(folder), FOLDERS[name])
    if not is_gguf(target):
        raise ValueError(f"{target} is no GGUF file; give the formats {', '.join(FOLDERS)} for a folder")
    if name == OWN:
        kind = Path(target).stem.rpartition(".")[2]
        return Checkpoint(kind, _bits(kind), target)
    if name not in FILES:
        known = ", ".join([OWN, *FILES, *FOLDERS])
        raise ValueError(f"format {name!r} is unknown; known are {known}")
    made = models / f"{Path(target).stem.rpartition('.')[0]}.{name}.gguf"
    if not made.exists():
        convert(Path(target), made, name)
    return Checkpoint(name, _bits(name), str(made))


def _bits(kind: str) -> int:
    """Returns the bits of a GGUF type's values: 4 of "Q4_1", 16 of "F16"."""
    digits = kind.lstrip("IQFB").partition("_")[0]
    if not digits.isdigit():
        raise ValueError(
            f"{kind!r} names no type of GGUF; name the file MODEL.TYPE.gguf, as in model.Q4_1.gguf"
        )
    return int(digits)


def _folder(file: str, models: Path) -> Path:
    """Returns a folder with the unpacked weights of a GGUF file, in fp32."""
    folder = models / f"{Path(file).stem}-unpacked"
    if not (folder / "config.json").exists():
        tokenizer = load_tokenizer(file)
        assert tokenizer is not None, "a GGUF file has a tokenizer"
        tokenizer.save_pretrained(folder)
        load_model(file, "cpu", torch.float32, blocks=False).save_pretrained(folder)
    return folder


def convert(source: Path, made: Path, name: str) -> None:
    """Writes a GGUF file with the weights of another one in another type. Vectors stay as they are.

    Args:
        name: one of ``FILES``.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    part = made.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    for key, known in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = FILES[name] if key == "general.file_type" else known.contents()
        writer.add_key_value(key, value, known.types[0], known.types[-1] if len(known.types) > 1 else None)
    wanted = gguf.GGMLQuantizationType[name]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(made)
