"""GGUF files are found, checked, unpacked, and decoded as by transformers."""

import json
import logging
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

import triforce_tree
from tests.support.distributions.block_folders import block_folder
from tests.support.distributions.head_folders import eagle_folder, medusa_folder
from tests.support.models.tiny_pair import SMALL, TinyPair
from tests.support.processes.messages import says
from triforce_tree.cli import arguments, options
from triforce_tree.config import load_arguments
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.fp32.linear import BLOCKS
from triforce_tree.loading import gguf as loading_gguf
from triforce_tree.loading import gguf_blocks
from triforce_tree.loading.checkpoints import load_model, load_tokenizer
from triforce_tree.models.host.gguf_linears import GgufEmbedding, GgufLinear

NAME = "tiny.gguf"
PROMPT = "def read(path):\n    return open(path).read()\n" * 12


@pytest.fixture(scope="module")
def path(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a GGUF file of the tiny target and its tokenizer, with large matrices quantised to 8 bits."""
    return written(pair, "Q8_0", tmp_path_factory.mktemp("gguf") / NAME)


def written(pair: TinyPair, name: str, file: Path) -> Path:
    """Writes the tiny target and its tokenizer, with large matrices in the type of this name."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    kind = gguf.GGMLQuantizationType[name]
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    config = LlamaConfig.from_pretrained(pair.target)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    made = begun(file, "llama", config)
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    made.add_tokenizer_model("gpt2")
    made.add_token_list([word for word, _ in words])
    made.add_token_types([3 if word == "<end>" else 1 for word, _ in words])
    made.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    made.add_eos_token_id(0)
    made.add_bos_token_id(0)
    finish(made, model, kind)
    return file


def begun(file: Path, architecture: str, config: Any) -> Any:
    """Begins a GGUF file with the sizes of a model."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    made = gguf.GGUFWriter(file, architecture)
    made.add_context_length(config.max_position_embeddings)
    made.add_embedding_length(config.hidden_size)
    made.add_block_count(config.num_hidden_layers)
    made.add_feed_forward_length(config.intermediate_size)
    made.add_head_count(config.num_attention_heads)
    made.add_head_count_kv(config.num_key_value_heads)
    made.add_layer_norm_rms_eps(config.rms_norm_eps)
    made.add_rope_freq_base(10_000.0)
    made.add_vocab_size(config.vocab_size)
    return made


def finish(made: Any, model: torch.nn.Module, kind: Any) -> None:
    """Adds the weights of a model to a GGUF file, matrices in this type, and writes it."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    for name, weight in model.state_dict().items():
        own = _NAMES.get(name) or "blk." + name.removeprefix("model.layers.")
        for old, new in _PARTS.items():
            own = own.replace(old, new)
        data = weight.numpy()
        if data.ndim == 2:
            made.add_tensor(own, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            made.add_tensor(own, data)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _merges(tokenizer: object) -> list[list[str]]:
    merges = json.loads(tokenizer._tokenizer.to_str())["model"]["merges"]  # type: ignore[attr-defined]
    return [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]


def test_three_levels_decode_a_gguf_file_as_transformers_does(path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=NAME, dtype=torch.float32)
    for source, more in ((path, {}), (str(path.parent), {"gguf_file": NAME})):
        engine = triforce_tree.load(source, path, levels=3, device="cpu", **load_arguments({**SMALL, **more}))
        weights = unpacked_weights(engine.target.model)
        for name, weight in reference.state_dict().items():
            assert torch.equal(weights[name], weight), name
        ids = engine.tokenizer(PROMPT, return_tensors="pt").input_ids
        out = engine.generate(PROMPT, max_new_tokens=12, do_sample=False)
        expected = reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert len(out.levels) == 3
        assert out.sequences[0, ids.shape[1] :].tolist() == expected.tolist()


def unpacked_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a model in fp32, by the package gguf for weights in blocks."""
    gguf = pytest.importorskip("gguf")
    state = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, GgufLinear | GgufEmbedding):
            name = next(name for name, blocks in BLOCKS.items() if blocks == module.blocks)
            values = gguf.dequantize(module.weight.numpy(), gguf.GGMLQuantizationType[name])
            state[f"{path}.weight"] = torch.from_numpy(values)
    return state


@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("more", [{}, {"exact": True}])
def test_blocks_decode_as_their_unpacked_weights(
    pair: TinyPair, kind: str, more: dict[str, object], tmp_path: Path
) -> None:
    file = written(pair, kind, tmp_path / NAME)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=NAME, dtype=torch.float32)
    engine = triforce_tree.load(file, pair.draft, levels=2, device="cpu", **load_arguments({**SMALL, **more}))
    layers = engine.target.model.model.layers
    assert isinstance(layers[1].mlp.down_proj, GgufLinear)
    assert isinstance(engine.target.model.get_output_embeddings(), GgufLinear)
    assert isinstance(engine.target.model.get_input_embeddings(), GgufEmbedding)
    weights = unpacked_weights(engine.target.model)
    assert all(torch.equal(weights[name], weight) for name, weight in reference.state_dict().items())
    # More tokens than the kernel multiplies in one pass over the weights, and few.
    ids = engine.tokenizer(PROMPT, return_tensors="pt").input_ids
    for count in (ids.shape[1], 5):
        prompt = ids[:, :count]
        out = engine.generate(prompt, max_new_tokens=24, do_sample=False).sequences
        assert out.tolist() == reference.generate(prompt, max_new_tokens=24, do_sample=False).tolist()


@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "medusa", "block"])
def test_trained_drafters_read_the_targets_head_and_embeddings_in_blocks(
    path: Path, kind: str, tmp_path: Path
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=NAME, dtype=torch.float32)
    make: Any = {
        "eagle3": eagle_folder,
        "p-eagle": partial(eagle_folder, mask_token_id=1, para_num=4),
        "medusa": partial(medusa_folder, tied=True),
        "block": partial(block_folder, inputs=(0,)),
    }[kind]
    options = {**SMALL, "device": "cpu", "drafter": make(tmp_path, reference)}
    engine = triforce_tree.load(path, levels=2, **load_arguments(options))
    assert isinstance(engine.target.model.get_output_embeddings(), GgufLinear)
    ids = engine.tokenizer(PROMPT, return_tensors="pt").input_ids
    out = engine.generate(ids, max_new_tokens=16, do_sample=False).sequences
    assert out.tolist() == reference.generate(ids, max_new_tokens=16, do_sample=False).tolist()


def test_a_drafter_is_trained_for_a_gguf_file(path: Path, script: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "tokens.npz", prose=np.random.default_rng(0).integers(1, 256, 500).astype(np.uint16))
    result = script("train_drafters.__main__").main([
        "--target", str(path), "--data", str(tmp_path / "tokens.npz"), "--out", str(tmp_path / "drafter"),
        "--contexts", "64", "--tokens", "64", "--segments", "2", "--segment", "8", "--depths", "2",
        "--steps", "2", "--evaluate", "--device", "cpu",
    ])  # fmt: skip
    assert result["steps"] == 2
    engine = triforce_tree.load(path, drafter=tmp_path / "drafter", device="cpu", **load_arguments(SMALL))
    assert len(engine.generate(PROMPT, max_new_tokens=2).levels) > 1


def test_a_gguf_file_is_saved_unpacked(path: Path, tmp_path: Path) -> None:
    load_model(path, "cpu", torch.float32, blocks=False).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=NAME, dtype=torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in reference.state_dict().items())


@pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize(("architecture", "make"), [("qwen2", Qwen2Config), ("qwen3", Qwen3Config)])
def test_other_architectures_keep_their_blocks(architecture: str, make: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    dim = 16 if architecture == "qwen2" else 128  # transformers reads no other from such files
    config = make(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=dim, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # norms and biases too
        torch.nn.init.normal_(weight, 0.5 if weight.dim() == 1 else 0.0, 0.2)
    made = begun(tmp_path / NAME, architecture, config)
    made.add_key_length(dim)
    made.add_value_length(dim)
    finish(made, model, gguf.GGMLQuantizationType.Q4_1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=NAME, dtype=torch.float32)
    loaded = load_model(tmp_path / NAME, "cpu")
    projection = loaded.model.layers[1].self_attn.q_proj
    assert isinstance(projection, GgufLinear)
    assert (projection.bias is None) == (architecture == "qwen3")
    weights = unpacked_weights(loaded)
    assert all(torch.equal(weights[name], weight) for name, weight in reference.state_dict().items())
    ids = torch.randint(320, (2, 9))
    ours, theirs = loaded(ids).logits, reference(ids).logits
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_without_a_compiler_weights_are_unpacked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "library", lambda: None)
    model = load_model(path, "cpu")
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=NAME, dtype=torch.float32)
    for name, weight in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list of the files that the package gguf has parsed."""
    gguf = pytest.importorskip("gguf")
    parsed: list[str] = []

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def __init__(self, path: str, *args: object) -> None:
            parsed.append(Path(path).name)
            super().__init__(path, *args)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    return parsed


def kept_files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def weights_of(path: Path, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """Returns unpacked weights; those of fp32 would stay in blocks."""
    engine = triforce_tree.load(path, levels=1, device="cpu", **load_arguments({"dtype": dtype}))
    return dict(engine.target.model.state_dict())


def test_it_is_unpacked_once_for_its_contents_and_dtype(
    path: Path, own_cache: Path, unpackings: list[str], tmp_path: Path
) -> None:
    first = weights_of(path)
    assert unpackings == [NAME, NAME]  # the tokenizer with the configuration, and the weights
    again = weights_of(path)
    # A copy in another folder has the same contents.
    copied = shutil.copy(path, tmp_path / "copy.gguf")
    os.link(path, tmp_path / NAME)
    linked = weights_of(tmp_path / NAME)
    assert unpackings == [NAME, NAME]
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, linked[name])
    half = weights_of(path, dtype="half")
    assert unpackings == [NAME] * 3
    assert {weight.dtype for weight in half.values()} == {torch.float16}
    assert load_tokenizer(path)(PROMPT).input_ids == load_tokenizer(copied)(PROMPT).input_ids


def test_a_file_that_changed_is_unpacked_again(path: Path, own_cache: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(path, tmp_path / "own.gguf"))
    before, times = weights_of(own), own.stat()
    content = bytearray(own.read_bytes())
    content[-4:] = b"\x00\x00\x00\x00" if content[-4:] != bytes(4) else b"\x00\x00\x80\x3f"
    own.write_bytes(content)
    # A copy may keep the modification time.
    os.utime(own, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = weights_of(own)
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "contents.json", "tokenizer.json"])
def test_a_damaged_entry_is_made_again(
    path: Path, own_cache: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights_of(path)
    good = kept_files(own_cache)
    for damaged in own_cache.rglob(file):
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        after = weights_of(path)
    assert "is damaged, so tiny.gguf is unpacked again" in caplog.text
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert kept_files(own_cache) == good


def test_without_room_it_is_unpacked_in_every_run(
    path: Path,
    own_cache: Path,
    unpackings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = shutil.disk_usage(path.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: usage)
    with caplog.at_level(logging.WARNING):
        first = weights_of(path)
    assert "cannot be kept in" in caplog.text
    assert "set TRIFORCE_TREE_CACHE to another folder" in caplog.text
    assert len(caplog.records) <= 2
    assert not kept_files(own_cache)
    once = len(unpackings)
    again = weights_of(path)
    assert len(unpackings) == 2 * once
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def test_a_folder_with_one_file_is_that_file(path: Path, pair: TinyPair, tmp_path: Path) -> None:
    assert weights_of(path.parent).keys() == weights_of(path).keys()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(path, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=says("GGUF files (a.gguf, b.gguf)", "gguf_file=")):
        triforce_tree.load(tmp_path)


def test_its_weights_can_be_copied_in_fewer_bits_and_streamed(path: Path) -> None:
    more = {"levels": 3, "offload_weights": True, "retrieval_weight_bits": 8}
    engine = triforce_tree.load(path, **load_arguments({**_WITHOUT_TREE, **more}))
    plain = triforce_tree.load(path, levels=1)
    assert engine.generate(PROMPT, max_new_tokens=8, do_sample=False).text == (
        plain.generate(PROMPT, max_new_tokens=8, do_sample=False).text
    )


_WITHOUT_TREE = {name: value for name, value in SMALL.items() if name not in ("tree", "window")}


def test_the_tokenizer_comes_from_the_file(path: Path, pair: TinyPair) -> None:
    own, whole = load_tokenizer(path), load_tokenizer(pair.target)
    assert own is not None
    assert whole is not None
    assert own(PROMPT).input_ids == whole(PROMPT).input_ids
    assert own.decode(own(PROMPT).input_ids) == PROMPT


def test_the_command_line_takes_it(path: Path) -> None:
    for words in (["--target", str(path)], ["--target", str(path.parent), "--gguf-file", NAME]):
        args = arguments.parser().parse_args(["generate", *words, "--device", "cpu", "--dtype", "bfloat16"])
        engine = options.engine_of(args)
        assert engine.target.model.dtype == torch.bfloat16
        assert engine.tokenizer is not None


def test_a_broken_file_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[:2000])
    with pytest.raises(ValueError, match=says("short.gguf", "cannot be used")):
        load_model(short)
    short.write_bytes(content[:-100])
    for load in (load_model, load_tokenizer, triforce_tree.load):
        with pytest.raises(ValueError, match=says("is cut off", len(content) - 100, "download it again")):
            load(short)
    layers = content.replace(b"block_count\x04\x00\x00\x00\x02", b"block_count\x04\x00\x00\x00\x99")
    assert layers != content
    short.write_bytes(layers)
    with pytest.raises(ValueError, match=says("short.gguf", "153 layers", "tensors")):
        load_model(short)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, pair: TinyPair) -> None:
    wrong = tmp_path / "wrong.gguf"
    with pytest.raises(FileNotFoundError, match=says("no such file", "wrong.gguf")):
        load_model(wrong)
    with pytest.raises(FileNotFoundError, match=says("no such file", "wrong.gguf")):
        triforce_tree.load(wrong)
    for content in (b"GGML" + bytes(40), b"GGUFxx"):
        wrong.write_bytes(content)
        for read in (load_model, triforce_tree.load):
            with pytest.raises(ValueError, match=says("wrong.gguf", "no GGUF file", "download it again")):
                read(wrong)
    for target, name, error, words in (
        (pair.target, "model.safetensors", ValueError, ("model.safetensors", "end in .gguf")),
        (pair.target, "none.gguf", FileNotFoundError, ("no such file", "none.gguf")),
        (None, "none.gguf", ValueError, ("needs a target",)),
        (load_model(pair.target), "none.gguf", TypeError, ("the target is a model",)),
    ):
        with pytest.raises(error, match=says(*words)):
            triforce_tree.load(target, gguf_file=name)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object, **__: object) -> None:
        raise ImportError("Please install gguf")

    file = tmp_path / NAME
    file.write_bytes(b"GGUF" + bytes(40))
    monkeypatch.setattr(loading_gguf.AutoConfig, "from_pretrained", without)
    with pytest.raises(ValueError, match=says("needs a package", "gguf", "pip install")):
        load_model(file)


def test_packed_weights_are_never_multiplied_by_downloaded_kernels() -> None:
    given = loading_gguf.gguf_arguments(Path(NAME), torch.float32)
    assert given["dtype"] == torch.float32
    if "quantization_config" in given:
        assert given["quantization_config"].dequantize is True


def test_weights_are_unpacked_to_the_dtype_of_the_device() -> None:
    assert loading_gguf.unpacked_dtype(None, torch.device("cpu")) == torch.float32
    assert loading_gguf.unpacked_dtype(None, torch.device("cuda")) == torch.bfloat16
