"""Targets with adapters of peft: every switch takes effect, and tokens equal those of peft's own generate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.head_folders import eagle_folder, medusa_folder
from tests.support.models.api_cases import CHUNKED, EXPECTED, PROMPT, SMALL, SMALL_LOOKUP, characters, new
from tests.support.models.families import greedy, perturbed, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import load_tokenizer

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about names and deleted adapters
NEW = 10
TARGET = tiny("llama-gqa")
DRAFT = perturbed(TARGET, 0.1)


def decoded(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return new(engine.generate(prompt, max_new_tokens=NEW, do_sample=False), prompt)


def small(target: Any, draft: Any = None, drafter: Path | None = None, **options: Any) -> Engine:
    """Returns an engine of small settings and three levels, with matched tokens for want of a drafter."""
    settings = SMALL if draft is not None else SMALL_LOOKUP
    if drafter is not None:
        settings = {name: value for name, value in settings.items() if name != "lookup"}
    arguments = load_arguments({"levels": 3, **settings, **options})
    return triforce_tree.load(target, draft, drafter=drafter, **arguments)


def lora(**options: Any) -> Any:
    layers = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(**{"r": 4, "target_modules": layers, "init_lora_weights": False, **options})


def adapted(model: Any, config: Any = None, seed: int = 0) -> Any:
    """Returns the model of peft with random adapters "a" and "b"; "a" is active."""
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, config or lora(), adapter_name="a")
    wrapped.add_adapter("b", config or lora())
    for name, weight in wrapped.named_parameters():
        if any(part in name for part in ("lora_", "modules_to_save")):
            weight.data += 0.2 * torch.randn_like(weight)
    wrapped.set_adapter("a")
    return wrapped.eval()


def own(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    """Returns the tokens of the model's own generate."""
    out = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)
    return out[0, len(prompt) :].tolist()


def check_switches(model: Any, engine: Engine) -> None:
    texts = []

    def same() -> None:
        texts.append(own(model))
        assert decoded(engine) == texts[-1]

    same()
    model.set_adapter("b")
    same()
    with model.disable_adapter():
        same()
    assert len({*map(tuple, texts)}) == 3
    model.set_adapter("a")
    same()
    assert texts[-1] == texts[0]


LORAS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "all linear layers": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "saved modules": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
}


@pytest.mark.parametrize("kind", LORAS)
def test_each_kind_of_lora(kind: str) -> None:
    model = adapted(tiny("llama-gqa"), lora(**LORAS[kind]))
    check_switches(model, small(model, DRAFT))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"levels": 1},
    "8 bits in level 1": {"retrieval_weight_bits": 8},
    "4 bits in level 1": {"retrieval_weight_bits": 4},
    "KV slots in host memory": {"offload": True},
    "exact": {"exact": True},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_each_level_follows_the_active_adapter(kind: str) -> None:
    model = adapted(tiny("llama-gqa"))
    check_switches(model, small(model, **SETTINGS[kind]))


@pytest.mark.parametrize("kind", ["head", "saved modules", "LoRA"])
def test_heads_of_the_base_model(tmp_path: Path, kind: str) -> None:
    base = tiny("llama-gqa", num_hidden_layers=3)
    folders = (
        # Those without a vocabulary of their own share the target's embeddings and its head.
        eagle_folder(tmp_path / "shared", base),
        eagle_folder(tmp_path / "eagle", base, embeddings=True, draft_vocabulary=32),
        medusa_folder(tmp_path / "medusa", base, tied=True),
    )
    for folder in folders:
        model = adapted(tiny("llama-gqa", num_hidden_layers=3), lora(**LORAS[kind]))
        check_switches(model, small(model, drafter=folder))


def test_a_draft_may_have_adapters_too() -> None:
    draft = adapted(tiny("llama-gqa"))
    engine = small(TARGET, draft)
    assert engine.draft is not None
    assert engine.draft.model is draft.get_base_model()
    assert decoded(engine) == EXPECTED[:NEW]
    draft.set_adapter("b")
    assert decoded(engine) == EXPECTED[:NEW]


METHODS: dict[str, Callable[[], Any]] = {
    "ADALORA": lambda: peft.AdaLoraConfig(total_step=10, **_layers()),
    "BOFT": lambda: peft.BOFTConfig(**_layers()),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=64, **_layers()),
    "HRA": lambda: peft.HRAConfig(**_layers()),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **_layers()),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "LOHA": lambda: peft.LoHaConfig(**_layers()),
    "LORA, layers repeated": lambda: lora(layer_replication=[[0, 2], [1, 2]]),
    "LOKR": lambda: peft.LoKrConfig(**_layers()),
    "OFT": lambda: peft.OFTConfig(**_layers()),
    "RANDLORA": lambda: peft.RandLoraConfig(**_layers()),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=[*range(1, 9)]),
    "VBLORA": lambda: peft.VBLoRAConfig(vector_length=8, num_vectors=16, **_layers()),
    "VERA": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"]),
}


def _layers() -> dict[str, Any]:
    return {"target_modules": ["q_proj", "v_proj", "down_proj"]}


def trained(model: Any, config: Any, noise: float) -> Any:
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for weight in wrapped.parameters():
        if weight.requires_grad:
            weight.data += noise * torch.randn_like(weight)
    return wrapped.eval()


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_of_peft(tmp_path: Path, method: str) -> None:
    model = trained(based(tmp_path), METHODS[method](), 0.2)
    expected = own(model)
    assert expected != EXPECTED[:NEW]
    assert decoded(small(model)) == expected
    model.save_pretrained(tmp_path / "adapter")
    assert decoded(small(tmp_path / "adapter")) == expected


def based(folder: Path) -> PreTrainedModel:
    """Returns a model that was read from ``folder / "base"``, which its adapters then name."""
    if not (folder / "base").exists():
        tiny("llama-gqa").save_pretrained(folder / "base")
    model: PreTrainedModel = type(TARGET).from_pretrained(folder / "base")
    return model


def test_models_with_injected_adapters_run_with_them() -> None:
    injected = peft.inject_adapter_in_model(lora(), tiny("llama-gqa"))
    for model in (injected, adapted(tiny("llama-gqa")).base_model):
        inside = model if model is injected else model.model
        assert decoded(small(model)) == greedy(inside, PROMPT, NEW) != EXPECTED[:NEW]
    with pytest.raises(ValueError, match="adapters of peft, which torchrun and offload_weights=True do not"):
        triforce_tree.load(injected, advanced={"offload_weights": True})


def test_a_model_of_peft_that_was_wrapped_again() -> None:
    model = trained(trained(tiny("llama-gqa"), lora(), 0.2), lora(target_modules=["k_proj"]), 0.2)
    assert decoded(small(model)) == own(model) != EXPECTED[:NEW]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"levels": 1},
    "lookup": {"levels": 2, "rounds": 1},
    "retrieval": {"levels": 3, "rounds": 2, "draft": DRAFT, "tree": SMALL["tree"]},
}


@pytest.mark.parametrize("path", CALLS)
def test_adapters_may_change_between_calls_of_transformers(path: str) -> None:
    run = triforce_tree.custom_generate(**load_arguments({**SMALL_LOOKUP, **CALLS[path]}))
    model = adapted(tiny("llama-gqa"))
    prompt, texts = torch.tensor([PROMPT]), []

    def same() -> None:
        options = {"input_ids": prompt, "do_sample": False, "max_new_tokens": NEW}
        texts.append(model.generate(**options, custom_generate=run)[0].tolist())
        assert texts[-1] == model.generate(**options)[0].tolist()

    def scale(factor: float) -> None:
        for module in model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):
                scaling["b"] *= factor

    same()
    model.set_adapter("b")
    same()
    with model.disable_adapter():
        same()
    assert len({*map(tuple, texts)}) == 3
    same()
    scale(4.0)
    same()
    scale(0.25)
    model.merge_adapter()
    same()
    model.unmerge_adapter()
    same()
    model.add_adapter("c", lora())
    model.set_adapter("c")
    same()
    model.base_model.set_adapter(["b", "c"])
    same()
    model.base_model.set_adapter("c")
    model.delete_adapter("c")
    same()


def test_several_adapters_in_one_batch_are_refused() -> None:
    model = adapted(tiny("llama-gqa"))
    prompts, names = [PROMPT, PROMPT[::-1]], ["a", "b"]
    engine = small(model)
    with pytest.raises(ValueError, match=r"adapter_names is no option .*; one adapter serves .* set_adapter"):
        engine.generate(prompts, adapter_names=names, max_new_tokens=3)
    run = triforce_tree.custom_generate(levels=1)
    with pytest.raises(ValueError, match="custom_generate takes one sequence, not 2 rows"):
        model.generate(
            input_ids=torch.tensor(prompts), adapter_names=names, custom_generate=run, max_new_tokens=3
        )
    model = adapted(tiny("llama-gqa"))
    expected = [own(model, prompt) for prompt in prompts]
    out = small(model).generate(prompts, max_new_tokens=NEW, do_sample=False)
    assert [ids[len(PROMPT) :] for ids in out.sequences.tolist()] == expected
    # One name for one sequence is what peft computes, too.
    options = {"input_ids": torch.tensor([PROMPT]), "adapter_names": ["b"], "max_new_tokens": NEW}
    ours = model.generate(**options, do_sample=False, custom_generate=run)
    assert ours.tolist() == model.generate(**options, do_sample=False).tolist()
    assert ours[0, len(PROMPT) :].tolist() != expected[0]


def test_nothing_of_another_adapter_is_used_again(tmp_path: Path) -> None:
    model = adapted(tiny("llama-gqa"))
    engine = small(model)
    session = engine.session(PROMPT)
    first = session.generate([5, 6], max_new_tokens=NEW, do_sample=False)
    session.save(tmp_path / "a")
    model.set_adapter("b")
    text = first.sequences[0].tolist()
    second = session.generate([7], max_new_tokens=NEW, do_sample=False)
    assert second.reused_tokens == 0
    assert new(second, [*text, 7]) == own(model, [*text, 7])
    with pytest.raises(ValueError, match="was saved with weights="):
        engine.load_session(tmp_path / "a")
    model.set_adapter("a")
    third = engine.load_session(tmp_path / "a").generate([7], max_new_tokens=NEW, do_sample=False)
    assert third.reused_tokens > len(PROMPT)
    assert new(third, [*text, 7]) == own(model, [*text, 7])
    with model.disable_adapter(), pytest.raises(ValueError, match="was saved with weights="):
        engine.load_session(tmp_path / "a")


def test_kept_prefixes_are_those_of_the_active_adapter() -> None:
    model = adapted(tiny("llama-gqa"))
    engine = triforce_tree.load(model, levels=3, **load_arguments({**CHUNKED, "prefix_cache": "64MiB"}))
    for name in ("a", "b", "a"):
        model.set_adapter(name)
        for prompt in (PROMPT, PROMPT[::-1]):
            assert decoded(engine, prompt) == own(model, prompt)
        again = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert again.reused_tokens > 0
        assert new(again) == own(model)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt tuning": (
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "is of the method PROMPT_TUNING, which adds to the prompt",
    ),
    "prefix tuning": (
        lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "is of the method PREFIX_TUNING, which adds to the prompt",
    ),
    "activated LoRA": (
        lambda: lora(alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"),
        "is active only after certain tokens of the prompt",
    ),
    "Lily": (lambda: peft.LilyConfig(**_layers()), "is of the method LILY, which weighs its experts by all"),
    "Poly": (lambda: peft.PolyConfig(r=4, **_layers()), "is of the method POLY, whose layers ask for"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_methods_of_whole_prompts_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, why = REFUSED[kind]
    model = peft.get_peft_model(based(tmp_path), make())
    with pytest.raises(ValueError, match=f"the adapter 'default' of .* {why}.*; use the model's own"):
        small(model)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"the adapter in '.*adapter' {why}"):
        small(tmp_path / "adapter")


def test_a_prompt_of_virtual_tokens_is_not_passed_by() -> None:
    tuned = peft.get_peft_model(
        tiny("llama-gqa"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    run = triforce_tree.custom_generate(levels=1)
    with pytest.raises(ValueError, match="has a prepare_inputs_for_generation of its own, by which adapters"):
        tuned.generate(input_ids=torch.tensor([PROMPT]), custom_generate=run, max_new_tokens=3)


def test_an_adapter_that_is_refused_later_is_refused_in_the_next_call() -> None:
    model = adapted(tiny("llama-gqa"))
    engine = small(model)
    decoded(engine)
    model.add_adapter("late", lora(alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="the adapter 'late' of LlamaForCausalLM is active only after"):
        decoded(engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapted(based(tmp_path)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved" / "a"


def test_a_folder_with_an_adapter(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft.PeftModel.from_pretrained(based(folder.parents[1]), folder)
    expected = own(model)
    assert expected != EXPECTED[:NEW]
    assert decoded(small(folder)) == expected
    # Weights that stay in host memory are merged.
    engine = small(folder, offload_weights=True)
    assert not any("lora" in name for name, _ in engine.target.model.named_parameters())
    assert decoded(engine) == expected
    assert decoded(small(TARGET, folder)) == EXPECTED[:NEW]
    # A relative path of the base is also looked for beside the adapter.
    change(folder, base_model_name_or_path="../../base")
    assert decoded(small(str(folder))) == expected
    # Another folder has that name where the process runs.
    (tmp_path / "elsewhere" / "here" / "now").mkdir(parents=True)
    (tmp_path / "elsewhere" / "base").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / "here" / "now")
    assert decoded(small(folder)) == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["LoRA", "saved modules"])
def test_an_adapter_with_new_tokens(tmp_path: Path, kind: str, tied: bool) -> None:
    tiny("llama-gqa", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    base = based(tmp_path)
    base.resize_token_embeddings(base.config.vocab_size + 8)
    model = adapted(base, lora(**LORAS[kind]))
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=True)
    prompt = [*PROMPT, base.config.vocab_size - 1]
    for options in ({}, {"offload_weights": True}):
        engine = small(tmp_path / "saved" / "a", **options)
        assert decoded(engine, prompt) == own(model, prompt)


@pytest.mark.parametrize("kind", ["head", "embeddings"])
def test_merging_into_tied_embeddings_leaves_the_head_alone(tmp_path: Path, kind: str) -> None:
    tiny("llama-gqa", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    model = adapted(based(tmp_path), lora(**LORAS[kind]))
    model.save_pretrained(tmp_path / "saved")
    assert decoded(small(tmp_path / "saved" / "a", offload_weights=True)) == own(model)


def test_what_cannot_be_merged_is_refused_with_the_remedy(tmp_path: Path) -> None:
    adapted(based(tmp_path), lora(lora_bias=True)).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"cannot be merged into .*or run without torchrun and offload_w"):
        small(tmp_path / "saved" / "a", offload_weights=True)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_tokenizer_is_the_adapters_or_its_bases(folder: Path) -> None:
    assert load_tokenizer(folder) is None
    tokenizer = characters()
    tokenizer.save_pretrained(folder.parents[1] / "base")
    found = load_tokenizer(folder)
    assert found is not None
    assert found.get_vocab() == tokenizer.get_vocab()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    own_tokenizer = load_tokenizer(folder)
    assert own_tokenizer is not None
    assert "<new>" in own_tokenizer.get_vocab()


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _rewritten(**changes: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    from safetensors.torch import load_file, save_file

    def run(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        for each in changes.values():
            each(weights)
        save_file(weights, folder / "adapter_model.safetensors")

    return run


WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "base": (
        lambda at: change(at, base_model_name_or_path="/nowhere"),
        "model '/nowhere' of .* is not found",
    ),
    "no base": (lambda at: change(at, base_model_name_or_path=None), "does not name its base model; set"),
    "adapter as base": (lambda at: change(at, base_model_name_or_path=str(at)), "is an adapter itself"),
    "revision": (lambda at: change(at, base_model_name_or_path="a/b", revision="x"), "names revision 'x'"),
    "pickle": (_pickled, "adapter_model.bin, a pickle, which may run code"),
    "cut": (
        lambda at: (at / "adapter_model.safetensors").write_bytes(b"1234"),
        "cannot be added .*give an a",
    ),
    "rank": (lambda at: change(at, r=2), "cannot be added to LlamaForCausalLM .*size mismatch"),
    "missing": (_rewritten(drop=lambda weights: weights.pop(WEIGHT)), "it lacks .*layers.0.*lora_A"),
    "unknown": (
        _rewritten(add=lambda weights: weights.update({"base_model.model.odd.lora_A.weight": torch.ones(1)})),
        "weights that no layer takes",
    ),
    "method": (lambda at: change(at, peft_type="MAGIC"), "cannot be added"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_adapter_is_refused_in_one_line(folder: Path, fault: str) -> None:
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises((ValueError, OSError), match=message) as error:
        small(folder)
    assert "\n" not in str(error.value)


def test_experts_with_adapters() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(tiny("qwen3-moe"), lora(target_modules=["q_proj"], target_parameters=names))
    for options in ({}, {"retrieval_weight_bits": 8}):
        check_switches(model, small(model, **options))
