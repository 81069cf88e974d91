"""Training of drafters: their networks, what is written, and that training continues and helps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import triforce_tree
from tests.support.distributions.head_folders import MTP
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.drafters.blocks.format import block_format
from triforce_tree.drafters.blocks.format import canonical as block_names
from triforce_tree.drafters.blocks.reference import Reference
from triforce_tree.drafters.heads.attention import attend, rotated
from triforce_tree.drafters.heads.eagle_format import canonical, eagle_format
from triforce_tree.drafters.heads.eagle_layer import EagleLayer
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.registry import WEIGHTS
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer
from triforce_tree.models.hf_model import HFModel

LAYERS, SINKS, WINDOW, DEPTHS = 3, 2, 9, 3


def target_of(**how: Any) -> LlamaForCausalLM:
    return tiny("llama-gqa", num_hidden_layers=LAYERS, **how)


@torch.no_grad()
def foreseeable() -> LlamaForCausalLM:
    """Returns a target whose next token follows mostly from the newest one, so that few steps teach it."""
    target = target_of()
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter *= 0.1
        elif name == "lm_head.weight":
            parameter *= 3
    return target


def words_of(folder: Path, *more: str) -> list[str]:
    return [
        "--target", str(folder / "target"), "--data", str(folder / "tokens.npz"),
        "--out", str(folder / "drafter"), "--contexts", "64", "120", "--tokens", "240", "--segments", "8",
        "--segment", "24", "--sinks", str(SINKS), "--window", str(WINDOW), "--depths", str(DEPTHS),
        "--mlp", "64", "--hidden", "32", "--head-dim", "16", "--warm-up", "3", "--minutes", "5",
        "--evaluate", *more,
    ]  # fmt: skip


def written_by(target: LlamaForCausalLM, folder: Path) -> None:
    """Saves the target, and texts that it wrote as training data."""
    target.save_pretrained(folder / "target")
    prompts = torch.randint(1, target.config.vocab_size, (16, 4))
    made = target.generate(prompts, max_new_tokens=120, do_sample=True, top_k=0, pad_token_id=0)
    np.savez(folder / "tokens.npz", prose=made.flatten().numpy().astype(np.uint16))


@torch.no_grad()
@pytest.mark.parametrize("at", [1, SINKS + WINDOW - 1, 30])
@pytest.mark.parametrize(
    ("kind", "own_head"), [("EagleNetwork", False), ("EagleNetwork", True), ("ParallelEagleNetwork", False)]
)
def test_the_trained_eagle_network_computes_what_the_drafter_does(
    script: Any, tmp_path: Path, at: int, kind: str, own_head: bool
) -> None:
    """Compares all depths at a position with few pairs before it, a full cache, and pairs that have left."""
    segments = script("train_drafters.segments")
    target = target_of()
    teacher = script("train_drafters.teacher").Teacher(target)
    network = getattr(script("train_drafters.eagle"), kind)(
        teacher, DEPTHS, 24, own_head, segments.Cache(SINKS, WINDOW)
    )
    for parameter in network.parameters():
        parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).half())
    script("train_drafters.folder").DrafterFolder(tmp_path, {"seed": 0}).save(network, 1.0)
    weights = HeadWeights(tmp_path, WEIGHTS, canonical)
    layer = EagleLayer(weights, eagle_format(tmp_path), network.features, HFModel(target))
    tokens = torch.randint(target.config.vocab_size, (2, 40))
    hidden = teacher.states(tokens, network.features)
    cut = segments.Segments(network.cache, torch.tensor([1]), torch.tensor([at]), min(4, 40 - at - DEPTHS))
    made = network(tokens, hidden, cut)
    kept = [*range(at + 1)] if at < SINKS + WINDOW else [*range(SINKS), *range(at + 1 - WINDOW, at + 1)]
    x = layer.fuse([hidden[i][1:, kept] for i in network.features])
    following = tokens[1:, torch.tensor(kept) + 1]
    cos, sin = (angle[None] for angle in layer.angles(len(kept) + DEPTHS, torch.device("cpu")))

    def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = rotated(q, k, cos[:, : q.shape[2]], sin[:, : q.shape[2]])
        return attend(q[:, :, -1:], k, v, torch.ones(1, 1, k.shape[2], dtype=torch.bool), scale)

    for depth in range(DEPTHS):
        fed, normed = layer.forward(0, following, x, following, attended, 1)
        expected = layer.logits(normed)
        torch.testing.assert_close(made[depth][:, :1] @ network.head.T, expected, rtol=1e-4, atol=1e-4)
        token = tokens[1:, at + 2 + depth, None]
        if layer.masked is not None:
            fed, token = layer.masked, torch.full_like(token, layer.format.mask_token)
        x, following = torch.cat([x, fed], 1), torch.cat([following, token], 1)


@torch.no_grad()
@pytest.mark.parametrize("at", [1, 30])
def test_the_trained_mtp_layer_computes_what_the_drafter_does(script: Any, tmp_path: Path, at: int) -> None:
    if not MTP:
        pytest.skip("this release of transformers reads no MTP layers")
    from triforce_tree.drafters.heads.mtp import MtpNetwork
    from triforce_tree.loading.mtp_checkpoint import mtp_tensors, read_mtp_layers

    segments, mtp = script("train_drafters.segments"), script("train_drafters.mtp")
    target = target_of()
    teacher = script("train_drafters.teacher").Teacher(target)
    network = mtp.MtpTraining(teacher, DEPTHS, segments.Cache(SINKS, WINDOW))
    for parameter in network.parameters():
        parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).half())
    script("train_drafters.folder").DrafterFolder(tmp_path, {"seed": 0}, mtp.FILE).save(network, 1.0)
    network.complete(tmp_path, None)
    loaded = triforce_tree.load(tmp_path, levels=1).target
    model = loaded.model
    layer = MtpNetwork(read_mtp_layers(model, mtp_tensors(model.config)), loaded, "a test")
    tokens = torch.randint(target.config.vocab_size, (2, 40))
    hidden = teacher.states(tokens, network.features)
    made = network(tokens, hidden, segments.Segments(network.cache, torch.tensor([1]), torch.tensor([at]), 2))
    kept = [*range(at + 1)] if at < SINKS + WINDOW else [*range(SINKS), *range(at + 1 - WINDOW, at + 1)]
    pairs, x = torch.tensor([kept]), hidden[LAYERS][1:, kept]

    def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return attend(q[:, :, -1:], k, v, torch.ones(1, 1, k.shape[2], dtype=torch.bool), scale)

    for depth in range(DEPTHS):
        fed, _ = layer.forward(0, tokens[1:, pairs[0] + 1], x, pairs + 1, attended, 1)
        torch.testing.assert_close(made[depth][:, :1], fed, rtol=1e-4, atol=1e-4)
        x, pairs = torch.cat([x, fed], 1), torch.cat([pairs, pairs[:, -1:] + 1], 1)


@torch.no_grad()
@pytest.mark.parametrize("at", [0, WINDOW, 30])
def test_the_trained_blocks_are_those_of_the_reference(script: Any, tmp_path: Path, at: int) -> None:
    """Compares the last of several blocks of a segment, whose context is that of its window."""
    segments = script("train_drafters.segments")
    target = target_of()
    teacher = script("train_drafters.teacher").Teacher(target)
    network = script("train_drafters.block").BlockTraining(teacher, DEPTHS, 2, 24, WINDOW)
    for parameter in network.parameters():
        parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).half())
    script("train_drafters.folder").DrafterFolder(tmp_path, {"seed": 0}).save(network, 1.0)
    tokens = torch.randint(target.config.vocab_size, (2, 50))
    hidden = teacher.states(tokens, network.features)
    start = torch.tensor([at])
    cut = segments.Segments(network.cache, torch.tensor([1]), start, 2 * DEPTHS, network.every)
    made = network(tokens, hidden, cut)
    format, last = block_format(tmp_path), at + DEPTHS
    assert cut.positions.tolist() == [[at, last]]
    slots = torch.tensor([tokens[1, last + 1], *[format.mask_token] * DEPTHS])
    states = [hidden[i][1, : last + 1] for i in format.inputs]
    reference = Reference(HeadWeights(tmp_path, WEIGHTS, block_names), format)
    expected = reference.hidden(teacher.embedded(slots), states)
    for depth in range(DEPTHS):
        torch.testing.assert_close(made[depth][0, 1], expected[1 + depth], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("at", [0, SINKS, WINDOW, 30])
def test_the_trained_draft_is_a_llama_over_sinks_and_a_window(script: Any, tmp_path: Path, at: int) -> None:
    """Positions are those in the cache, which holds between one and two windows behind the sinks."""
    segments = script("train_drafters.segments")
    teacher = script("train_drafters.teacher").Teacher(target_of())
    cache = segments.Cache(SINKS, WINDOW)
    network = script("train_drafters.draft").DraftTraining(teacher, 32, 1, 16, 24, cache)
    script("train_drafters.folder").DrafterFolder(tmp_path, {"seed": 0}).save(network, 1.0)
    draft = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, length = torch.randint(teacher.head.shape[0], (2, 60)), 2 * WINDOW
    [made] = network(tokens, {}, segments.Segments(cache, torch.tensor([1]), torch.tensor([at]), length))
    begins = max(SINKS, at + 1 - WINDOW)
    for place, position in enumerate(range(at + 1, at + 1 + length)):
        left = max(0, (position - begins) // WINDOW - 1) * WINDOW
        kept = [*range(min(SINKS, position + 1)), *range(begins + left, position + 1)]
        expected = draft(tokens[1:, kept]).logits[:, -1]
        torch.testing.assert_close(made[:, place] @ network.head.T, expected, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_a_drafts_embedding_keeps_the_products_of_the_targets_head(script: Any) -> None:
    target = target_of()
    teacher, size = script("train_drafters.teacher").Teacher(target), target.config.hidden_size
    cache, training = script("train_drafters.segments").Cache(), script("train_drafters.draft").DraftTraining
    made = training(teacher, size, 1, 16, 24, cache)
    weighed = teacher.head * teacher.last_norm
    products = [x @ x.mT for x in (weighed, made.head)]
    scale = products[0].norm() / products[1].norm()
    torch.testing.assert_close(products[1] * scale, products[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="--head-dim 48"):
        training(teacher, 64, 1, 48, 64, cache)


def accepted(folder: Path, target: LlamaForCausalLM, prompt: list[int], expected: list[int]) -> float:
    """Returns accepted tokens of a pass with the drafter in a folder, whose greedy text is checked."""
    config = json.loads((folder / "config.json").read_text())
    advanced: dict[str, Any] = {"rounds": 1}
    if "dflash_config" not in config:
        advanced |= {"sinks": SINKS, "window": WINDOW}
    given: dict[str, Any] = {"target": target, "drafter": folder}
    if "num_mtp_layers" in config:
        given = {"target": folder, "drafter": "mtp"}
    elif config["architectures"] == ["LlamaForCausalLM"]:
        given = {"target": target, "draft": folder}
    engine = triforce_tree.load(**given, levels=2, tree="chain:3", advanced=advanced)
    out = engine.generate(prompt, max_new_tokens=len(expected), do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == expected
    length = out.levels[1].mean_accepted_length
    assert length is not None
    return length


@pytest.mark.release
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "mtp", "dflash", "draft"])
def test_a_short_training_helps_and_goes_on(script: Any, tmp_path: Path, kind: str) -> None:
    if kind == "mtp" and not MTP:
        pytest.skip("this release of transformers reads no MTP layers")
    target, main = foreseeable(), script("train_drafters.__main__").main
    written_by(target, tmp_path)
    words = words_of(tmp_path, "--kind", kind)
    prompt = prompt_of(50)
    expected = greedy(target, prompt, 48)
    main([*words, "--steps", "1"])
    before = accepted(tmp_path / "drafter", target, prompt, expected)
    # Neither of these calls is long enough by itself.
    for _ in range(2):
        main([*words, "--steps", "50"])
    assert accepted(tmp_path / "drafter", target, prompt, expected) > before + 0.5
    with pytest.raises(ValueError, match="mlp=64, now it is 32"):
        main([*words, "--mlp", "32"])


def test_a_training_ends_in_time_and_measures_what_it_wrote(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training has minutes, the call a second; the same call later has another second."""
    target = target_of(vocab_size=4096)
    target.save_pretrained(tmp_path / "target")
    load_tokenizer(PAIR / "target").save_pretrained(tmp_path / "target")
    np.savez(tmp_path / "tokens.npz", code=np.random.default_rng(0).integers(1, 4096, 500).astype(np.uint16))
    more = ["--seconds", "0.5", "--windows", "2", "--new", "12", "--own-head", "--json", "--log-every", "1"]
    words = [*words_of(tmp_path, "80", "200"), *more]
    main, folder = script("train_drafters.__main__").main, tmp_path / "drafter"
    result = main(words)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result))
    assert 0.5 <= result["seconds"] < 60
    assert result["bytes"] == (folder / "model.safetensors").stat().st_size
    for name in ("overlap_80", "agreement_80", "overlap_200", "agreement_200"):
        assert len(result[name]) == DEPTHS
        assert all(0 <= value <= 1 for value in result[name])
    assert main(words)["seconds"] >= result["seconds"] + 0.5
    head, *rows = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert head["settings"]["kind"] == "eagle3"
    assert head["about"]["seed"] == 0
    steps = [row for row in rows if "step" in row]
    assert all({"loss", "overlap_1", "call_seconds"} <= row.keys() for row in steps)
    assert [row["what"] for row in rows].count("result") == 2
    with pytest.raises(SystemExit, match="3000 is more than the target's 2048 positions"):
        main([*words, "--contexts", "3000"])


@torch.no_grad()
def test_an_overlap_is_that_of_the_distributions(script: Any, tmp_path: Path) -> None:
    """Measures the first depth at the end of one text, beside the drafter's logits."""
    by_context, segments = (script(f"train_drafters.{name}") for name in ("evaluate", "segments"))
    target = target_of()
    teacher = script("train_drafters.teacher").Teacher(target)
    ids, cache = prompt_of(40), segments.Cache(SINKS, WINDOW)
    network = script("train_drafters.eagle").EagleNetwork(teacher, DEPTHS, 24, False, cache)
    found = by_context.by_context(network, teacher, ids, 40, 1, 1)
    tokens = torch.tensor([ids])
    p = target(tokens).logits[0, 40 - DEPTHS].softmax(-1)
    cut = segments.Segments(cache, torch.tensor([0]), torch.tensor([40 - DEPTHS - 1]), 1)
    made = network(tokens, teacher.states(tokens, network.features), cut)[0][0, 0]
    q = (made @ network.head.T).softmax(-1)
    assert found["overlap_40"][0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-3)
    assert found["agreement_40"][0] == float(p.argmax() == q.argmax())
