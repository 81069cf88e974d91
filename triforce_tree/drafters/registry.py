"""The formats of trained drafters, and which of them a folder holds.

A further format is one module with a class and one line of ``FORMATS``. Importing this module does not import
torch, so that a wrong folder is refused before anything is loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from triforce_tree.runtime.files.json_files import read_json

if TYPE_CHECKING:
    from triforce_tree.drafters.base import Drafter

CONFIG = "config.json"
MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
MASK_EMBEDDING = "mask_embedding.pt"
"""A file that some block drafters have beside their weights."""
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""The model types of assistants that read the target's keys and values."""
MUSE = "muse_glimmer_assistant"
"""The model type of transformers' own block drafter."""


PARTS = ("dflash_config", "eagle_config", "transformer_layer_config")
"""The fields of ``config.json`` that hold further fields."""
MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")
"""The fields for the mask token of a P-EAGLE head, by different writers."""


class Format(NamedTuple):
    """One kind of trained drafter.

    Attributes:
        title: for messages.
        found: returns whether a folder with these contents of ``config.json`` and these file names is of this
            format.
        drafter: module and class, ``module:Class``. The class takes the folder and the options.
        options: names of the options of ``load`` that the class takes.
    """

    title: str
    found: Callable[[Mapping[str, Any], frozenset[str]], bool]
    drafter: str
    options: tuple[str, ...]


def _drafts_blocks(config: Mapping[str, Any], files: frozenset[str]) -> bool:
    kinds = [config.get("speculators_model_type"), *(config.get("architectures") or ())]
    named = any(name in str(kind).lower() for kind in kinds for name in ("dflash", "dspark", "domino"))
    named = named or "dflash_config" in config or config.get("model_type") == MUSE
    return named and not files.isdisjoint(WEIGHTS)


def _drafts_in_parallel(config: Mapping[str, Any], files: frozenset[str]) -> bool:
    parts = [config, *(config.get(name) or {} for name in PARTS)]
    named = config.get("speculators_model_type") == "peagle"
    named = named or any(part.get(name) is not None for part in parts for name in MASK_TOKENS)
    return named and not files.isdisjoint(WEIGHTS)


_HEADS = "triforce_tree.drafters.heads"
_BLOCKS = "triforce_tree.drafters.blocks"
_TREES = ("tree", "other_trees")
PAIRED = (*_TREES, "sinks", "window")
"""The options of drafters whose cache holds sinks and a window."""
# The first format that a folder fulfils is taken.
FORMATS = (
    Format("Medusa heads", lambda _, files: not files.isdisjoint(MEDUSA), f"{_HEADS}.medusa:Medusa", _TREES),
    Format(
        "a block drafter (DFlash, DSpark)", _drafts_blocks, f"{_BLOCKS}.drafter:BlockDrafter",
        PAIRED,
    ),
    Format(
        "a Gemma 4 assistant", lambda config, _: config.get("model_type") in ASSISTANTS,
        "triforce_tree.drafters.gemma4:Gemma4Assistant", _TREES,
    ),
    Format("a P-EAGLE head", _drafts_in_parallel, f"{_HEADS}.parallel_eagle:ParallelEagle3", PAIRED),
    Format(
        "an EAGLE-3 head", lambda _, files: not files.isdisjoint(WEIGHTS), f"{_HEADS}.eagle:Eagle3",
        PAIRED,
    ),
)  # fmt: skip
FILES = (CONFIG, *MEDUSA, *WEIGHTS, "model-*.safetensors", MASK_EMBEDDING)
"""Files that are downloaded of a drafter on the hub."""


def settings(folder: Path) -> dict[str, Any]:
    """Returns the contents of ``config.json``; empty if there is no such file.

    Raises:
        ValueError: the file cannot be read, or one of its parts has another form.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object; copy or download it again")
    for name in PARTS:
        if not isinstance(config.get(name), dict | None):
            raise ValueError(
                f"{name}={config[name]!r} in {str(path)!r} must be an object; remove or repair it"
            )
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures={names!r} in {str(path)!r} must be a list of names; repair it")
    return config


def format_of(folder: Path) -> Format:
    """Returns the format of the trained drafter in a folder.

    Raises:
        FileNotFoundError: the folder holds none.
        ValueError: ``config.json`` cannot be read.
    """
    config, files = settings(folder), frozenset(path.name for path in folder.iterdir())
    for each in FORMATS:
        if each.found(config, files):
            return each
    known = ", ".join(each.title for each in FORMATS)
    raise FileNotFoundError(
        f"{str(folder)!r} holds no trained drafter; give the folder of one ({known}) with {CONFIG} and "
        f"{' or '.join((*WEIGHTS, *MEDUSA))}"
    )


def trained_drafter(folder: Path, options: Mapping[str, Any]) -> "Drafter":
    """Loads the trained drafter in a folder.

    Args:
        options: options of ``load``; the format's own are given to its class.

    Raises:
        OSError, ValueError: the folder holds no drafter, or it cannot be used.
    """
    chosen = format_of(folder)
    module, _, name = chosen.drafter.partition(":")
    drafter: Drafter = getattr(import_module(module), name)(folder, **options_of(chosen.options, options))
    return drafter


def options_of(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the user's ``options`` that are in ``names`` and have a value."""
    return {name: options[name] for name in names if options.get(name) is not None}
