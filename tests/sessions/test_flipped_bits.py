"""Saved sessions whose files are not those that were written: each is refused, with the name of the file."""

import random
import shutil
from pathlib import Path

import pytest

from tests.support.models.families import prompt_of
from tests.support.models.session_cases import NINE, PROMPT, cold, engine, made
from tests.support.models.session_files import contents, file_of
from triforce_tree.sessions.folders import FILE, checksum

pytestmark = pytest.mark.usefixtures("small_rings")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of messages in ``s``, and another one in ``other``."""
    folder = tmp_path_factory.mktemp("kept")
    session = engine().session([{"role": "user", "content": "Who is it"}])
    session.generate(**NINE)
    session.save(folder / "s")
    session.generate("Why", **NINE)
    session.save(folder / "other")
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "s", tmp_path / "s"))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens", "layer-00000", "layer-00001"])
def test_of_tensors(name: str, folder: Path) -> None:
    path = file_of(folder, name)
    bits = 8 * path.stat().st_size
    own = engine()
    for bit in [0, 64, bits - 1, *random.Random(name).sample(range(bits), 40)]:
        flip(path, bit)
        with pytest.raises(ValueError, match=rf"/s/{path.name} is damaged \(.*\); save the session again$"):
            own.load_session(folder)
        flip(path, bit)
    assert own.load_session(folder).generate("Why", **NINE).reused_tokens


def test_of_states(tmp_path: Path) -> None:
    own = made("lfm2").with_options()
    session = own.session(PROMPT)
    session.generate(**NINE)
    session.save(tmp_path)
    path = file_of(tmp_path, "states")
    for bit in random.Random(1).sample(range(8 * path.stat().st_size), 20):
        flip(path, bit)
        with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
            own.load_session(tmp_path)
        flip(path, bit)
    assert own.load_session(tmp_path).generate([8], **NINE).reused_tokens


def test_of_every_byte_of_the_file_that_names_the_others(folder: Path) -> None:
    path = folder / "session.json"
    draws, own = random.Random(2), engine()
    for place in range(path.stat().st_size):
        bit = 8 * place + draws.randrange(8)
        flip(path, bit)
        with pytest.raises(ValueError, match=r"/s/session\.json is damaged \(.*\); save the session again$"):
            own.load_session(folder)
        flip(path, bit)
    assert own.load_session(folder).messages


def test_after_a_flipped_bit_nothing_is_used(folder: Path) -> None:
    """It is found while the buffers are filled, in which another session was."""
    own = engine()
    other = own.session(prompt_of(90))
    other.generate(**NINE)
    flip(file_of(folder, "layer-00001"), 4000)
    with pytest.raises(ValueError, match="is damaged"):
        own.load_session(folder)
    before = list(other.tokens)
    assert other.generate([1], **NINE).reused_tokens == 0
    assert other.tokens == cold([*before, 1])
    assert own.generate(PROMPT, **NINE).sequences[0].tolist() == cold(PROMPT)


def test_sizes(folder: Path) -> None:
    for name, data in contents(folder).items():
        for wrong in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", b"\0" * len(data)):
            (folder / name).write_bytes(wrong)
            with pytest.raises(ValueError, match=rf"/s/{name} is damaged \(.*\); save the session again$"):
                engine().load_session(folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"{name} is missing; "):
            engine().load_session(folder)
        (folder / name).write_bytes(data)
    assert engine().load_session(folder).messages


def test_files_that_are_swapped_or_of_another_save(kept: Path, folder: Path) -> None:
    whole = contents(folder)
    first, second = (file_of(folder, name) for name in ("layer-00000", "layer-00001"))
    first.write_bytes(whole[second.name])
    second.write_bytes(whole[first.name])
    with pytest.raises(ValueError, match=f"{first.name} is damaged"):
        engine().load_session(folder)
    first.write_bytes(whole[first.name])
    for name in ("tokens", "layer-00001"):
        path = file_of(folder, name)
        path.write_bytes(file_of(kept / "other", name).read_bytes())
        with pytest.raises(ValueError, match=f"{path.name} is damaged" if name == "tokens" else "is damaged"):
            engine().load_session(folder)
        path.write_bytes(whole[path.name])
    second.write_bytes(whole[second.name])
    shutil.copy(kept / "other" / "session.json", folder)
    with pytest.raises(
        FileNotFoundError, match=r"tokens-\w+\.safetensors is missing; save the session again"
    ):
        engine().load_session(folder)


def test_files_that_no_session_names_are_no_fault(kept: Path, folder: Path) -> None:
    shutil.copy(file_of(kept / "other", "layer-00000"), folder)
    (folder / "notes.txt").write_text("mine")
    assert engine().load_session(folder).messages


def test_a_session_of_another_version(folder: Path) -> None:
    path = folder / FILE
    rest = path.read_bytes().partition(b'", ')[2].replace(b'"format": 1,', b'"format": 7,')
    path.write_bytes(b'{"checksum": "%s", %s' % (checksum(rest).encode(), rest))
    with pytest.raises(
        ValueError, match=r"was saved in format 7, and this version reads 1; prefill its text anew$"
    ):
        engine().load_session(folder)
