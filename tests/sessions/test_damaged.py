"""Saved sessions whose files say what cannot be, with checksums that fit: nothing is used of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.families import prompt_of
from tests.support.models.session_cases import NINE, PROMPT, cold, engine, made
from tests.support.models.session_files import REMOVED, change, fields, file_of, rewrite
from triforce_tree.config import load_arguments

pytestmark = pytest.mark.usefixtures("small_rings")
MESSAGES = [{"role": "user", "content": "Who"}]
# Of a text of 159 tokens.
FIELDS: list[tuple[str, Any]] = [
    *((name, REMOVED) for name in ("whole", "chunk", "messages", "begun", "turns")),
    *(("whole", wrong) for wrong in ("a", -3, 10**9, 1.0, None, True, 1, 159)),
    *(("chunk", wrong) for wrong in (0, -8, "a", None)),
    *(("messages", wrong) for wrong in ([1], "a", {}, [{"content": "a"}], [MESSAGES], [*MESSAGES, 1])),
    *(("begun", wrong) for wrong in ([1], -1, 1, "a")),
    *(("turns", wrong) for wrong in ([1], [[1]], [[1, 2, 3]], [[1, "a"]], [[1, 1]], [[-1, 0]], "ab", {})),
]
Parts = dict[str, torch.Tensor]
TENSORS: dict[str, Callable[[Parts], Parts]] = {
    "renamed": lambda parts: {f"{name}s": part for name, part in parts.items()},
    "one is missing": lambda parts: dict(list(parts.items())[1:]),
    "one more": lambda parts: {**parts, "more": torch.zeros(1)},
    "of fewer positions": lambda parts: {name: part[:, :-1].contiguous() for name, part in parts.items()},
    "of other heads": lambda parts: {name: part[1:].contiguous() for name, part in parts.items()},
    "of another head": lambda parts: {name: part[..., 1:].contiguous() for name, part in parts.items()},
    "of other dimensions": lambda parts: {name: part[0] for name, part in parts.items()},
    "scalars": lambda parts: {name: torch.tensor(0.0) for name in parts},
    "of another dtype": lambda parts: {name: part.half() for name, part in parts.items()},
}
TOKENS: dict[str, Callable[[], Parts]] = {
    "renamed": lambda: {"token": torch.arange(3)},
    "none": lambda: {"tokens": torch.empty(0, dtype=torch.int64)},
    "rows": lambda: {"tokens": torch.zeros(2, 3, dtype=torch.int64)},
    "a scalar": lambda: {"tokens": torch.tensor(3)},
    "floats": lambda: {"tokens": torch.zeros(159)},
    "outside the vocabulary": lambda: {"tokens": torch.full((159,), 10**6)},
    "negative": lambda: {"tokens": torch.full((159,), -1)},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "8 bits": ("llama-gqa", {"kv_bits": 8}),
    "windows": ("gemma3", {}),
    "offloaded": ("llama-gqa", {"offload": True}),
    "offloaded windows": ("gemma3", {"offload": True}),
}


def saved(tmp_path: Path, family: str = "llama-gqa", **options: Any) -> Path:
    session = made(family).with_options(**load_arguments(options)).session(PROMPT)
    session.generate(**NINE)
    session.save(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """A copy of a good session."""
    return Path(shutil.copytree(kept, tmp_path / "s"))


@pytest.mark.parametrize(
    "name, value", FIELDS, ids=lambda value: "removed" if value is REMOVED else str(value)
)
def test_fields(name: str, value: object, folder: Path) -> None:
    change(folder, **{name: value})
    with pytest.raises(
        ValueError, match=rf"session\.json is damaged \(.*{name.rstrip('s')}.*\); save the session again"
    ):
        engine().load_session(folder)


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_a_layer(case: str, folder: Path) -> None:
    rewrite(folder, "layer-00001", TENSORS[case](load_file(file_of(folder, "layer-00001"))))
    with pytest.raises(
        ValueError, match=r"layer-00001-\w+\.safetensors is damaged \(.*; save the session again"
    ):
        engine().load_session(folder)


@pytest.mark.parametrize("case", TOKENS)
def test_tokens(case: str, folder: Path) -> None:
    rewrite(folder, "tokens", TOKENS[case]())
    with pytest.raises(ValueError, match=r"tokens-\w+\.safetensors is damaged \(.*; save the session again"):
        engine().load_session(folder)


DESCRIPTIONS: dict[str, Any] = {
    "of no layer": {"layer-00001": REMOVED},
    "of one layer more": {"layer-00002": {"checksum": "0" * 16, "tensors": {}}},
    "outside the folder": {"../../layer": {"checksum": "0" * 16, "tensors": {}}},
    "a list": {"layer-00001": []},
    "without a checksum": {"layer-00001": {"tensors": {}}},
    "of a checksum that is a number": {"layer-00001": {"checksum": 1, "tensors": {}}},
    "of an unknown dtype": {"layer-00001": {"checksum": "0" * 16, "tensors": {"k": ["BOOL", 1]}}},
    "of a negative size": {"layer-00001": {"checksum": "0" * 16, "tensors": {"k": ["F32", -1]}}},
    "of a size that is no number": {"layer-00001": {"checksum": "0" * 16, "tensors": {"k": ["F32", "1"]}}},
    "of a huge size": {"layer-00001": {"checksum": "0" * 16, "tensors": {"k": ["F32", 1 << 60]}}},
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_descriptions(case: str, folder: Path) -> None:
    described = {**fields(folder)["files"], **DESCRIPTIONS[case]}
    change(folder, files={name: value for name, value in described.items() if value is not REMOVED})
    if case == "of one layer more":
        (folder / file_of(folder, "layer-00001").name.replace("00001", "00002")).touch()
    with pytest.raises(ValueError, match=r"is damaged \(.*\); save the session again"):
        engine().load_session(folder)


@pytest.mark.parametrize("save", ["../../..", 3, None, "0123456"])
def test_names_of_files(save: object, folder: Path) -> None:
    change(folder, save=save)
    with pytest.raises(ValueError, match=r"session\.json is damaged \(.*\); save the session again"):
        engine().load_session(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["one is missing", "of fewer positions", "of another dtype"])
def test_tensors_of_other_caches(kind: str, case: str, tmp_path: Path) -> None:
    family, options = KINDS[kind]
    own = made(family).with_options(**load_arguments(options))
    folder = saved(tmp_path, family, **options)
    for file in folder.glob("layer-*"):
        name, parts = file.name[:11], load_file(file)
        rewrite(folder, name, TENSORS[case](parts))
        with pytest.raises(ValueError, match=f"{file.name} is damaged"):
            own.load_session(folder)
        rewrite(folder, name, parts)
    assert own.load_session(folder).generate([8], **NINE).reused_tokens == 158


@pytest.mark.parametrize("case", ["renamed", "one is missing", "of another head", "of another dtype"])
def test_states(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "lfm2")
    rewrite(folder, "states", TENSORS[case](load_file(file_of(folder, "states"))))
    with pytest.raises(ValueError, match=r"states-\w+\.safetensors is damaged"):
        made("lfm2").with_options().load_session(folder)
    file_of(folder, "states").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"states-\w+\.safetensors is missing; save the session again"
    ):
        made("lfm2").with_options().load_session(folder)


def test_after_a_refused_load_all_goes_on(folder: Path, tmp_path: Path) -> None:
    """The engine's buffers may hold another session, which is not read again."""
    own = engine()
    other = own.session(prompt_of(90))
    other.generate(**NINE)
    for name, value in (("whole", "a"), ("whole", 10**9), ("turns", [1])):
        wrong = Path(shutil.copytree(folder, tmp_path / f"{name}{value}"))
        change(wrong, **{name: value})
        with pytest.raises(ValueError, match="is damaged"):
            own.load_session(wrong)
    change(wrong, turns=[])
    rewrite(wrong, "layer-00001", TENSORS["of fewer positions"](load_file(file_of(wrong, "layer-00001"))))
    with pytest.raises(ValueError, match="is damaged"):
        own.load_session(wrong)
    length = len(other.tokens)
    assert other.generate([1], **NINE).reused_tokens >= length - 1
    loaded = own.load_session(folder)
    tokens = list(loaded.tokens)
    assert loaded.generate([1, 2], **NINE).reused_tokens == len(tokens) - 1
    assert loaded.tokens == cold([*tokens, 1, 2])
    assert own.generate(PROMPT, **NINE).sequences[0].tolist() == cold(PROMPT)
