"""Model folders of unknown origin: errors have one line, and code in the folders never runs."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM

import triforce_tree
from tests.support.models.families import prompt_of, tiny
from tests.support.models.tiny_pair import Change, TinyPair, settings
from tests.support.processes.messages import says
from triforce_tree.loading.checkpoints import load_model, load_tokenizer
from triforce_tree.loading.model_folder import INDEX, WEIGHTS

# A test may raise the peak memory of the process by at most this many KiB (``ru_maxrss``).
MOST_GROWTH = 64 << 10


@pytest.fixture
def folder(pair: TinyPair, tmp_path: Path) -> Path:
    shutil.copytree(pair.target, tmp_path / "model")
    return tmp_path / "model"


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def in_shards(folder: Path) -> dict[str, Any]:
    """Splits the folder's weights into several files, and returns their index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    return index


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


class Malicious:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_an_index_may_name_safetensors_only(folder: Path, tmp_path: Path) -> None:
    index, marker = in_shards(folder), tmp_path / "ran"
    (folder / "weights.bin").write_bytes(pickle.dumps(Malicious(marker)))
    first = next(iter(index["weight_map"]))
    for name in ("weights.bin", 7, None, ["model.safetensors"]):
        index["weight_map"][first] = name
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=says(INDEX, "only .safetensors are loaded")) as error:
            load_model(folder)
        one_line(error)
    assert not marker.exists()


OUTSIDE = ["../other.safetensors", "a/../../other.safetensors", "/other.safetensors", "C:other.safetensors"]
OUTSIDE += ["..\\other.safetensors", "./other.safetensors", "\0.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_may_not_name_files_outside_the_folder(folder: Path, name: str) -> None:
    index = in_shards(folder)
    first = next(iter(index["weight_map"]))
    shutil.copy(folder / index["weight_map"][first], folder.parent / "other.safetensors")
    index["weight_map"][first] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=says(INDEX, "not inside the folder")) as error:
        load_model(folder)
    one_line(error)


@pytest.mark.parametrize("name", ["../model.safetensors", "pytorch_model.bin", "x.index.json", 3])
def test_a_configuration_may_not_name_other_weights(folder: Path, name: object) -> None:
    settings(transformers_weights=name)(folder)
    with pytest.raises(ValueError, match=says("config.json", "as a weight file")) as error:
        load_model(folder)
    one_line(error)


INDICES = {
    "not JSON": "{",
    "a list": "[]",
    "no map": "{}",
    "an empty map": '{"weight_map": {}, "metadata": {}}',
    "no metadata": '{"weight_map": {"a": "model.safetensors"}}',
    "a missing file": '{"weight_map": {"a": "b.safetensors"}, "metadata": {}}',
}


@pytest.mark.parametrize("case", INDICES)
def test_a_broken_index_is_refused(folder: Path, case: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(INDICES[case])
    with pytest.raises((ValueError, OSError), match="index") as error:
        load_model(folder)
    one_line(error)


def test_shards_that_are_links_load(folder: Path) -> None:
    """The files of a hub snapshot are links."""
    expected = load_model(folder).state_dict()
    in_shards(folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    loaded = load_model(folder).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the folder the cached snapshot of ``somebody/model``."""
    snapshot = tmp_path / "hub/models--somebody--model/snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_hub_id_is_checked_like_a_folder(hub: Path) -> None:
    in_shards(hub)
    assert load_tokenizer("somebody/model") is not None
    assert load_model("somebody/model").num_parameters() == load_model(hub).num_parameters()
    index = json.loads((hub / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "weights.bin"
    (hub / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=says("only .safetensors are loaded")):
        load_model("somebody/model")


@pytest.mark.parametrize("name", ["models/lama", "a/b/c", "a model", "lama"])
def test_a_mistyped_path_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=says("no such folder", name, "owner/name")) as error:
        triforce_tree.load(name)
    one_line(error)


def test_without_a_network_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError. An error happened while trying to locate the files")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=says("'some/model'", "hub cannot be reached")) as error:
        triforce_tree.load("some/model")
    assert "Got:" not in str(error.value)
    one_line(error)


EVIL = (
    "from pathlib import Path\nPath({!r}).mkdir()\nclass Config: pass\nclass Model: pass\nclass Tok: pass\n"
)


@pytest.fixture
def marker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a path that exists if the folder's evil.py has run; questions are answered with yes."""
    marker = folder.parent / "ran"
    (folder / "evil.py").write_text(EVIL.format(str(marker)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return marker


MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tok", None]}


def test_code_in_a_models_folder_is_not_run(folder: Path, marker: Path) -> None:
    settings(auto_map=MAP, model_type="evil")(folder)
    with pytest.raises(ValueError, match=says("'evil'", "auto_map", "not run", "load it yourself")) as error:
        triforce_tree.load(folder)
    one_line(error)
    assert not marker.exists()


def test_a_known_family_loads_without_its_code(folder: Path, marker: Path) -> None:
    settings(auto_map=MAP)(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": MAP}))
    engine = triforce_tree.load(folder)
    assert type(engine.target.model).__module__.startswith("transformers.")
    assert engine.tokenizer is not None
    assert not marker.exists()


def test_code_of_a_tokenizer_is_not_run(folder: Path, marker: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text("tokenizer_config.json", json.dumps({"tokenizer_class": "Tok", "auto_map": MAP}))(folder)
    with pytest.raises(ValueError, match=says("tokenizer", "auto_map", "not run", "tokenizer=")) as error:
        triforce_tree.load(folder)
    one_line(error)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_named_by_a_configuration_are_not_downloaded(folder: Path, name: str) -> None:
    settings(**{name: "somebody/kernels"})(folder)
    assert load_model(folder).config._attn_implementation in ("sdpa", "eager")


CONFIGURATIONS: dict[str, tuple[Change, str]] = {
    "not JSON": (text("config.json", "hello"), "corrupt"),
    "binary": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\0"), "corrupt"),
    "a list": (text("config.json", "[1]"), "holds a list, not an object"),
    "null": (text("config.json", "null"), "not an object"),
    "deep list": (text("config.json", "[" * 100_000), "nested deeper than 32"),
    "deep object": (text("config.json", '{"a":' * 500 + "1" + "}" * 500), "nested deeper than 32"),
    "no type": (text("config.json", "{}"), "model_type=None"),
    "unknown type": (settings(model_type="abacus"), "model_type='abacus'"),
    "type of a list": (settings(model_type=["llama"]), "model_type=['llama']"),
    "encoder-decoder": (text("config.json", '{"model_type": "t5"}'), "is a t5 model"),
    "hidden size": (settings(hidden_size=33), "not a multiple of the number of attention heads"),
    "text": (settings(hidden_size="32"), "hidden_size='32'"),
    "not an integer": (settings(hidden_size=32.0), "hidden_size=32.0"),
    "NaN": (settings(vocab_size=float("nan")), "vocab_size=nan"),
    "no heads": (settings(num_attention_heads=0), "num_attention_heads=0"),
    "negative heads": (settings(num_attention_heads=-4), "num_attention_heads=-4"),
    "no layers": (settings(num_hidden_layers=0), "num_hidden_layers=0"),
    "positions": (settings(max_position_embeddings=-1), "max_position_embeddings=-1"),
    "other size": (settings(hidden_size=64), "is [384, 32] in the checkpoint and [384, 64] by config.json"),
    "other heads": (settings(num_key_value_heads=4), "k_proj.weight is [16, 32] in the checkpoint"),
    "huge vocabulary": (settings(vocab_size=10**12), "from 1 to 2147483647"),
    "large vocabulary": (settings(vocab_size=10**9), "describes 64000"),
    "huge layers": (settings(num_hidden_layers=10**9), "from 1 to 65536"),
    "many layers": (settings(num_hidden_layers=60_000), "60000 layers, its checkpoint holds 21 tensors"),
    "more layers": (settings(num_hidden_layers=3), "lacks 9 weights"),
    "huge heads": (settings(head_dim=10**12), "its checkpoint holds"),
    "beyond 64 bits": (settings(intermediate_size=10**30), "cannot be used"),
    "rotation": (settings(rope_parameters={"rope_type": "wild"}), "'wild'"),
    "activation": (settings(hidden_act="magic"), "'magic'"),
    "dtype": (settings(dtype="float3"), "float3"),
    "quantised": (settings(quantization_config=[1]), "cannot be used"),
    "generation": (text("generation_config.json", "{"), "generation_config.json' is corrupt"),
    "generation list": (text("generation_config.json", "[]"), "generation_config.json' is corrupt"),
    "tokenizer": (text("tokenizer.json", "{"), "the tokenizer in"),
    "tokenizer list": (text("tokenizer.json", "[]"), "the tokenizer in"),
    "tokenizer settings": (text("tokenizer_config.json", "[]"), "the tokenizer in"),
    "adapter": (text("adapter_config.json", "{}"), "delete adapter_config.json if this is a whole model"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_an_unusable_folder_is_refused_in_one_line(folder: Path, case: str) -> None:
    change, expected = CONFIGURATIONS[case]
    change(folder)
    before = peak_memory()
    with pytest.raises((ValueError, OSError)) as error:
        triforce_tree.load(folder, device="cpu")
    assert expected in one_line(error)
    assert peak_memory() - before < MOST_GROWTH


def peak_memory() -> int:
    """Returns the peak memory of this process in KiB."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_sizes_under_a_familys_own_names_are_checked(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    for name, value in (("n_layer", 10**9), ("num_hidden_layers", 10**9), ("n_head", 0)):
        before = (tmp_path / "config.json").read_text()
        settings(**{name: value})(tmp_path)
        with pytest.raises(ValueError, match=says(f"{name}={value}", "from 1 to")):
            load_model(tmp_path)
        (tmp_path / "config.json").write_text(before)


def test_a_directory_in_place_of_a_file_is_refused(folder: Path) -> None:
    for name, error in (("generation_config.json", IsADirectoryError), ("config.json", FileNotFoundError)):
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(error, match=name):
            load_model(folder)
        (folder / name).rmdir()


def test_a_folder_without_a_tokenizer_takes_token_ids(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert load_tokenizer(folder) is None
    out = triforce_tree.load(folder).generate(prompt_of(20), max_new_tokens=2)
    assert out.text is None


def test_a_missing_package_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object, **__: object) -> None:
        raise ImportError("abacus is needed: `pip install abacus`")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", without)
    with pytest.raises(ValueError, match=says("a package that is not installed", "pip install abacus")):
        load_model(folder)


def test_a_checkpoint_whose_names_are_converted_loads(tmp_path: Path) -> None:
    """Weight names that transformers converts while it loads them are not a mismatch."""
    model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    ids = torch.tensor([prompt_of(9)])
    assert torch.equal(load_model(tmp_path)(ids).logits, model(ids).logits)
