"""Saved sessions."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triforce_tree
from tests.support.models.families import tiny
from tests.support.models.session_cases import NINE, PROMPT, cold, engine, made
from tests.support.models.session_files import change, file_of
from triforce_tree.config import load_arguments

pytestmark = pytest.mark.usefixtures("small_rings")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "device": ("llama-gqa", {}),
    "8 bits": ("llama-gqa", {"kv_bits": 8}),
    "windows": ("gemma3", {}),
    "offloaded": ("llama-gqa", {"offload": True}),
    "offloaded windows": ("gemma3", {"offload": True}),
    "recurrent": ("lfm2", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    family, options = KINDS[kind]
    own = made(family).with_options(**load_arguments(options))
    session = own.session(PROMPT, reserve=100)
    session.generate(**NINE)
    session.save(tmp_path / "one")
    tokens = list(session.tokens)
    expected = session.generate([1, 2], **NINE).sequences[0].tolist()
    other = made(family).with_options(**load_arguments(options))
    loaded = other.load_session(tmp_path / "one", reserve=100)
    assert loaded.tokens == tokens
    out = loaded.generate([1, 2], **NINE)
    assert out.reused_tokens == len(tokens) - 1
    assert loaded.tokens == expected
    sizes = [path.stat().st_size for path in (tmp_path / "one").glob("layer-*")]
    assert len(sizes) == sum(shape is not None for shape in own.target.kv_layers)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_from_the_device_to_the_host_and_back(family: str, tmp_path: Path) -> None:
    session = made(family).with_options().session(PROMPT)
    session.generate(**NINE)
    session.save(tmp_path / "device")
    tokens = list(session.tokens)
    loaded = made(family).with_options(offload=True).load_session(tmp_path / "device")
    loaded.save(tmp_path / "host")
    for path in (tmp_path / "device").glob("layer-*"):
        for name, part in load_file(path).items():
            assert torch.equal(part, load_file(file_of(tmp_path / "host", path.name[:11]))[name])
    again = made(family).with_options().load_session(tmp_path / "host")
    for each in (loaded, again):
        assert each.generate([8], **NINE).reused_tokens == len(tokens) - 1
        assert each.tokens == cold([*tokens, 8], family)


def test_a_conversation_is_saved(tmp_path: Path) -> None:
    own = engine()
    session = own.session([{"role": "user", "content": "Who is it"}])
    session.generate(**NINE)
    session.save(tmp_path)
    loaded = engine().load_session(tmp_path)
    assert (loaded.messages, loaded.turns) == (session.messages, session.turns)
    loaded.generate("Why", **NINE)
    session.generate("Why", **NINE)
    assert loaded.tokens == session.tokens


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_nothing_is_continued_from_the_text_before(family: str, tmp_path: Path) -> None:
    """Rings and states that were copied at the end of its prompt say nothing of the loaded session."""
    session = made(family).with_options().session(PROMPT)
    session.generate(**NINE)
    session.save(tmp_path)
    own = made(family).with_options()
    own.session([*reversed(PROMPT[:120])]).generate(**NINE)
    loaded = own.load_session(tmp_path)
    loaded.trim(130)
    out = loaded.generate([3, 4], output_logits=True, **NINE)
    assert out.reused_tokens == 0
    asked = [*PROMPT[:130], 3, 4]
    expected = (
        made(family)
        .with_options(advanced={"prefix_cache": False})
        .generate(asked, output_logits=True, **NINE)
    )
    for ours, theirs in zip(out.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_models_and_damaged_files_are_refused(tmp_path: Path) -> None:
    session = engine().session(PROMPT)
    session.generate(**NINE)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file' is a file, and a session is a folder; give another"):
        session.save(tmp_path / "file")
    session.save(tmp_path / "s")
    with torch.no_grad():
        target = tiny("llama-gqa")
        target.lm_head.weight.mul_(1.01)
    changed = triforce_tree.load(target, levels=1)
    cases = {
        "model='LlamaForCausalLM llama-2x32.* load that model": made("gemma3"),
        "weights='.* load the weights that it was saved with": changed,
        "kv_bits=16, this engine has 8; give the engine this kv_bits": engine(kv_bits=8),
    }
    for message, other in cases.items():
        with pytest.raises(ValueError, match=message):
            other.load_session(tmp_path / "s")
    change(tmp_path / "s", tokenizer="x")
    with pytest.raises(ValueError, match=r"tokenizer='x', this engine has .* load the tokenizer"):
        engine().load_session(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(FileNotFoundError, match=r"holds no session, as session\.json is missing"):
        engine().load_session(tmp_path / "s")
    with pytest.raises(ValueError, match="the session has no tokens yet"):
        engine().session().save(tmp_path / "s")
